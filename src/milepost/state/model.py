"""Models: saved by parameter name, restored straight into the live tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..collecting import no_collecting
from ..errors import MismatchError, MissingError, UnsupportedStateError
from ..tensors.boxes import is_sharded
from ..tensors.dtypes import dtype_name, dtype_of_code, named_dtype
from ..tensors.flat import Run
from ..tensors.unpack import leaf_tag, unpack_item
from .fitting import Fit, find_fit
from .flattened import flat_state, is_flattened, reshard
from .names import named_parameters
from .parts import Alike
from .places import places_in
from .plain import loads_plainly
from .report import LoadReport, restoring
from .setup import stored_versions
from .source import StateSource, load_item, new_like, new_tensor, subtree
from .walks import walk_of
from .wrappers import unwrap

__all__ = ["ModelPart", "load_weights"]

Rename = Callable[[str], str]

_BATCH_BYTES = 256 * 1024 * 1024
"""Bytes of whole tensors that are read at a time for working copies."""


class ModelPart(Alike):
    """A module under its stored names.

    Args:
        module: The module, with or without compile and data-parallel wrappers.
        strict: Whether every name must be on both sides, with equal shape and dtype. A lenient load
            takes what fits and converts dtypes.
        rename: Maps a stored name to the name in the live module before they are matched.
    """

    def __init__(
        self, module: nn.Module, *, strict: bool = True, rename: Rename | None = None
    ) -> None:
        self.module = unwrap(module)
        self.strict = strict
        self._rename = rename

    def capture(self) -> dict[str, Any]:
        """Return the state by clean name."""
        plain = walk_of(self.module).state()
        if plain is not None:
            return plain
        return {clean: value for clean, (_, value) in self._live().items()}

    def leaders(self) -> Collection[str]:
        """Return the names of buffers: of several ranks the leader's are saved."""
        return walk_of(self.module).buffers

    def frozen(self) -> Collection[str]:
        """Return the names of parameters that do not require gradients."""
        walk = walk_of(self.module)
        if not walk.is_flat:
            return walk.frozen()
        return {
            name for name, parameter in named_parameters(self.module) if not parameter.requires_grad
        }

    def check(self, source: StateSource, item: str, report: LoadReport) -> None:
        """Compare names, shapes and dtypes."""
        if self._find_fit(source, item) is None:
            self._match(source, item, report)

    def apply(self, source: StateSource, item: str, report: LoadReport) -> None:
        """Read the stored tensors into the live ones.

        Raises:
            MismatchError: A lenient load that matched nothing at all.
        """
        fit = self._find_fit(source, item)
        if fit is not None and loads_plainly(self.module, walk_of(self.module).modules()):
            with no_collecting():
                wanted = fit.wanted(item)
            source.read(wanted)
            report.loaded.extend(map(f"{item}: ".__add__, fit.names))
            return
        silent = LoadReport(report.source)
        matches = self._match(source, item, silent)
        if not matches and (silent.missing or silent.unexpected):
            report.missing, report.unexpected = silent.missing, silent.unexpected
            raise MismatchError(
                f"None of the {silent.num_wanted} tensors of the model are in {source.name}, "
                f"which holds {len(silent.unexpected)} others.\n{silent.summary()}\n",
                safe="The model was not changed.",
                hint="Give rename= a function from stored names to the model's.",
                report=report,
            )
        if self._takes_tensors_in_place(source.trees[item], matches):
            self._read_in_place(source, item, matches)
            self._read_copies(source, item, matches)
            reshard(self.module)
        else:
            self._load_through_hooks(source, item, matches)
        report.loaded.extend(f"{item}: {stored}" for stored, _ in matches.values())

    def _live(self) -> dict[str, tuple[str, Any]]:
        """Return ``clean name -> (own name, value)``.

        Raises:
            UnsupportedStateError: Two entries have one name once it is free of wrappers.
        """
        walk = walk_of(self.module)
        clean = walk.clean
        if walk.is_flat:
            return {name: (name, one) for name, one in flat_state(self.module, clean).items()}
        live: dict[str, tuple[str, Any]] = {}
        for own, value in self.module.state_dict().items():
            name = clean(own)
            if name in live:
                raise UnsupportedStateError(
                    f"The model's {live[name][0]!r} and {own!r} would both be saved as {name!r}: "
                    "one of them would be lost.",
                    hint="Names must differ in more than what torch.compile and data parallelism "
                    "add to them.",
                    names=[live[name][0], own],
                )
            live[name] = (own, value)
        return live

    def _find_fit(self, source: StateSource, item: str) -> Fit | None:
        """Return what is stored if that is just what the module has, and nobody has to be asked."""
        live = None if self._rename else walk_of(self.module).state()
        if live is None:
            return None
        with no_collecting():
            return find_fit(live, source.trees[item], lambda: source.tensors(item))

    def _match(
        self, source: StateSource, item: str, report: LoadReport
    ) -> dict[str, tuple[str, Any]]:
        """Return ``own name -> (stored name, live value)`` of what fits, and report the rest."""
        with no_collecting():
            return self._find_matches(source, item, report)

    def _find_matches(
        self, source: StateSource, item: str, report: LoadReport
    ) -> dict[str, tuple[str, Any]]:
        live = self._live()
        tree = source.trees[item]
        infos = source.tensors(item)
        if not isinstance(tree, Mapping) or "$" in tree:
            report.problems.append(f"{item} is not the state of a model.")
            return {}
        matches: dict[str, tuple[str, Any]] = {}
        live_of: dict[Any, tuple[str, Any]] = {}
        shapers = self._shapers()
        for stored, tag in tree.items():
            name = self._rename(stored) if self._rename else stored
            if name not in live:
                report.unexpected.append(f"{item}: {stored}")
                continue
            own, value = live.pop(name)
            if is_lazy(value) or name.rpartition(".")[0] in shapers:
                matches[own] = (stored, value)  # what shape it takes is decided in there
            elif self._fits(f"{item}: {name}", tag, infos, value, report):
                matches[own] = (stored, value)
                stored_key = tag.get("key") if isinstance(tag, Mapping) else None
                first, key = live_of.setdefault(_memory_of(value), (name, stored_key))
                if key != stored_key:
                    report.notes.append(
                        f"{item}: {first} and {name} are one tensor here and were two when they "
                        "were saved: it has the value of the last."
                    )
        report.missing.extend(f"{item}: {name}" for name in live)
        return matches

    def _shapers(self) -> frozenset[str]:
        """Return the names of modules that may give their tensors another shape in a load.

        Observers of quantization do, memories, and modules that find out their shapes when they are
        called first.
        """
        walk = walk_of(self.module)
        if walk.is_flat:
            return frozenset()
        return frozenset(
            name
            for name, member in zip(walk.module_names, walk.modules(), strict=True)
            if not loads_plainly(member, [member])
        )

    def _fits(
        self, label: str, tag: Any, infos: Mapping[str, Any], value: Any, report: LoadReport
    ) -> bool:
        if isinstance(value, Tensor) and value.is_meta:
            report.problems.append(
                f"{label} is on the meta device and has no memory; call to_empty(device=...) first."
            )
            return False
        if _is_plain_fit(tag, infos, value):
            return True
        is_leaf = isinstance(tag, Mapping) and tag.get("$") == "tensor"
        if not is_leaf or not isinstance(value, Tensor | Run):
            return True
        if isinstance(value, Tensor) and value.layout is not torch.strided:
            return True
        key = leaf_tag(tag)
        if key not in infos:
            report.problems.append(f"{label} refers to a tensor that the checkpoint lacks.")
            return False
        shape, dtype = infos[key].shape, dtype_of_code(infos[key].code)
        if "dtype" in tag:
            shape, dtype = shape[:-1], named_dtype(tag["dtype"])
        if tuple(value.shape) != shape:
            report.mis_shaped.append(f"{label} (stored {list(shape)}, live {list(value.shape)})")
            return False
        if value.dtype is not dtype:
            stored = "unknown" if dtype is None else dtype_name(dtype)
            change = f"{label} (stored {stored}, live {dtype_name(value.dtype)})"
            (report.mis_typed if self.strict else report.cast).append(change)
            return not self.strict
        return True

    def _takes_tensors_in_place(
        self, tree: Mapping[str, Any], matches: Mapping[str, tuple[str, Any]]
    ) -> bool:
        """Return whether loading a state dict would do no more than copy into each tensor."""
        for stored, value in matches.values():
            tag = tree[stored]
            if not (type(tag) is dict or isinstance(tag, Mapping)) or tag.get("$") != "tensor":
                return False
            if type(value) is Tensor or is_sharded(value):
                if value.layout is not torch.strided:
                    return False
            elif not isinstance(value, Run):
                return False
        if is_flattened(self.module):
            return True  # its hooks are about the very form that is not used here
        return loads_plainly(self.module, walk_of(self.module).modules())

    def _read_in_place(
        self, source: StateSource, item: str, matches: Mapping[str, tuple[str, Any]]
    ) -> None:
        tree, infos = source.trees[item], source.tensors(item)
        wanted: list[tuple[str, str, Tensor | Run]] = []
        later: list[tuple[Tensor | Run, Any, dict[str, Tensor | Run]]] = []
        with no_collecting():
            for stored, value in matches.values():
                tag = tree[stored]
                key = leaf_tag(tag)
                is_dtype = value.dtype is dtype_of_code(infos[key].code)
                if "dtype" not in tag and is_dtype:
                    wanted.append((item, key, value))
                else:
                    raw = new_like(value, infos[key])
                    wanted.append((item, key, raw))
                    later.append((value, tag, {key: raw}))
        source.read(wanted)
        with torch.no_grad():
            for value, tag, made in later:
                found = unpack_item(tag, made.__getitem__)
                if isinstance(value, Run):
                    value.data.copy_(found.data)
                else:
                    value.copy_(found)

    def _read_copies(
        self, source: StateSource, item: str, matches: Mapping[str, tuple[str, Any]]
    ) -> None:
        """Write what is computed with in place of runs, some of it at a time."""
        tree, infos = source.trees[item], source.tensors(item)
        batch: list[tuple[Tensor, Any, dict[str, Tensor]]] = []
        num_bytes = 0
        runs = {stored: v for stored, v in matches.values() if isinstance(v, Run) and v.copies}
        for last, (stored, run) in enumerate(runs.items(), start=1 - len(runs)):
            for copy in run.copies:
                if isinstance(copy, Run):
                    copy.data.copy_(run.data)
                    continue
                key = leaf_tag(tree[stored])
                whole = new_tensor(infos[key])
                batch.append((copy, tree[stored], {key: whole}))
                num_bytes += whole.nbytes
            if batch and (num_bytes >= _BATCH_BYTES or last == 0):
                source.read([(item, key, one) for _, _, made in batch for key, one in made.items()])
                with torch.no_grad():
                    for copy, tag, made in batch:
                        copy.copy_(unpack_item(tag, made.__getitem__))
                batch, num_bytes = [], 0

    def _load_through_hooks(
        self, source: StateSource, item: str, matches: Mapping[str, tuple[str, Any]]
    ) -> None:
        tree, infos = source.trees[item], source.tensors(item)
        sharded = {
            leaf_tag(tree[stored]): value
            for stored, value in matches.values()
            if isinstance(value, Tensor) and is_sharded(value)
        }
        into = {key: new_like(value, infos[key]) for key, value in sharded.items()}
        stored = load_item(source, item, into=into)
        state = _StateDict((own, stored[name]) for own, (name, _) in matches.items())
        version_of = stored_versions(source, item)
        if version_of is not None:
            state._metadata = self._metadata(version_of)
        self.module.load_state_dict(state, strict=self.strict)

    def _metadata(self, version_of: Callable[[str], int]) -> OrderedDict[str, dict[str, int]]:
        """Return what torch hands on to modules beside a state dict of theirs."""
        clean = walk_of(self.module).clean
        return OrderedDict(
            (path, {"version": version_of(clean(f"{path}.").rstrip("."))})
            for path, _ in places_in(self.module)
        )


class _StateDict(OrderedDict[str, Any]):
    """A state dict as torch makes it."""

    _metadata: OrderedDict[str, dict[str, int]]


def _memory_of(value: Any) -> Any:
    """Return what is equal for two names of one tensor, which state dicts give as two objects."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or not value.numel():
        return id(value)
    if type(value) not in (Tensor, nn.Parameter):
        return id(value)
    return value.data_ptr(), value.dtype, value.shape, value.stride()


def _is_plain_fit(tag: Any, infos: Mapping[str, Any], value: Any) -> bool:
    """Return whether a tag is of a dense tensor that is just like a live one, as nearly all are."""
    if type(tag) is not dict or type(value) is not Tensor or "dtype" in tag:
        return False
    info = infos.get(str(tag.get("key"))) if tag.get("$") == "tensor" else None
    return (
        info is not None
        and value.layout is torch.strided
        and info.shape == value.shape
        and value.dtype is dtype_of_code(info.code)
    )


def _with_item(source: StateSource, item: str) -> StateSource:
    """Return a source that shows an item, which may be a member of a group."""
    group, _, member = item.partition("/")
    trees = source.trees
    if item in trees:
        return source
    if member and isinstance(trees.get(group), Mapping) and member in trees[group]:
        return subtree(source, group, member)
    raise MissingError(f"{source.name} holds no item {item!r}.", hint=f"It holds {sorted(trees)}.")


def load_weights(
    source: StateSource,
    item: str,
    module: nn.Module,
    *,
    strict: bool = False,
    rename: Rename | None = None,
) -> LoadReport:
    """Load only the weights of one model.

    Args:
        source: Where they are stored.
        item: Name of the model's item, or ``item/member`` of a group.
        module: The live model.
        strict: See :class:`ModelPart`.
        rename: Maps stored names to live ones.

    Raises:
        MissingError: There is no such item.
        MismatchError: Something does not fit (strict), or nothing fits at all.
    """
    report = LoadReport(source.name)
    source = _with_item(source, item)
    part = ModelPart(module, strict=strict, rename=rename)
    with restoring(source.name, item):
        part.check(source, item, report)
        if strict:
            report.require_exact()
        part.apply(source, item, report)
    return report
