"""DeepSpeed: ZeRO 1, 2 and 3 as what they are made of, so that any layout can go on from them.

    engine, _, _, _ = deepspeed.initialize(model=model, config=config, ...)
    with mp.Checkpointer("runs/a", loader=loader, **tracked(engine)) as run:
        ...

An engine computes with weights of low precision and keeps others in float32, which it steps and
cuts among the ranks. Those are the model that is saved, under the names of the parameters, and the
moments with them; the weights of low precision follow from them and are not stored. So a checkpoint
is that of a plain float32 model and its optimizer, and goes on as that, in FSDP or DDP, on any
number of ranks, and the other way round.

Nothing is gathered for a save. The tables of the cuts are those of DeepSpeed 0.19; older ones are
not tested. The only file that knows DeepSpeed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import UnsupportedStateError
from ..state.flattened import FlatShare, register
from ..state.objects import Value
from ..tensors.flat import Run

__all__ = ["tracked"]

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")

_ELSEWHERE = {
    "cpu_offload": "offloads its optimizer",
    "offload_optimizer": "offloads its optimizer",
    "offload_param": "offloads its parameters",
    "has_moe_layers": "has experts",
    "zenflow": "uses ZenFlow",
}
"""What keeps state in other places, by the attribute that says so."""

Clean = Callable[[str], str]


def tracked(engine: Any) -> dict[str, Any]:
    """Return what to track of an engine.

    Args:
        engine: From ``deepspeed.initialize``, with ZeRO 1, 2 or 3.

    Returns:
        ``model``, ``optimizer``, ``engine`` (its counters and the scale of the loss) and, if it
        steps one, ``scheduler``: arguments of ``Checkpointer``.

    Raises:
        UnsupportedStateError: Another kind of engine, or one that keeps state in other places:
            offloaded, in experts, in stages, in tensor parallel pieces.
    """
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    zero = engine.optimizer
    _check(engine, zero)
    flattening = (_Stage3 if isinstance(zero, DeepSpeedZeroOptimizer_Stage3) else _Stage12)(zero)
    inner: Optimizer = zero.optimizer
    module: nn.Module = engine.module
    flattening.module = module
    register(module, inner, flattening)
    counters = _Counters(engine)
    found: dict[str, Any] = {
        "model": module,
        "optimizer": inner,
        "engine": Value(counters.get, counters.set),
    }
    if hasattr(engine.lr_scheduler, "state_dict"):
        found["scheduler"] = engine.lr_scheduler
    return found


def _check(engine: Any, zero: Any) -> None:
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    kinds = (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)
    if isinstance(engine, PipelineEngine):
        problem = "is a PipelineEngine"
    elif not isinstance(zero, kinds):
        problem = f"has a {type(zero).__name__}, which is not of ZeRO 1, 2 or 3"
    elif not isinstance(zero.optimizer, Optimizer):
        problem = f"has a {type(zero.optimizer).__name__}, which is no optimizer of torch"
    else:
        found = [text for name, text in _ELSEWHERE.items() if getattr(zero, name, False)]
        if getattr(zero, "zero_hpz_partition_size", 1) > 1:
            found.append("keeps a second partition of the weights")
        group = zero.model_parallel_group
        if group is not None and dist.get_world_size(group) > 1:
            found.append("has pieces of tensors on its ranks")
        problem = " and ".join(found)
    if problem:
        raise UnsupportedStateError(
            f"The DeepSpeed engine {problem}: what it keeps cannot be saved by parameter.",
            safe="Nothing was touched.",
            hint="Use engine.save_checkpoint, and report the folder that it wrote.",
        )


class _Zero:
    """What is known of an engine's flat tensors.

    Args:
        zero: Its optimizer.
    """

    module: nn.Module

    def __init__(self, zero: Any) -> None:
        self.zero = zero

    def shares(self, clean: Clean) -> list[FlatShare]:
        """Return what this rank has of every parameter."""
        names: dict[int, list[str]] = defaultdict(list)
        parameters: dict[int, nn.Parameter] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            names[id(parameter)].append(clean(name))
            parameters[id(parameter)] = parameter
        return [
            FlatShare(
                tuple(names[key]),
                run,
                parameters[key],
                owner,
                offset,
                0 if owner is None else owner.numel(),
            )
            for key, (run, owner, offset) in self.runs().items()
            if key in names
        ]

    def runs(self) -> dict[int, tuple[Run, Tensor | None, int]]:
        """Return of each parameter, by its id, its elements, their owner, and where they begin."""
        raise NotImplementedError

    def owners(self) -> list[list[Tensor]]:
        """Return the flat tensors of each group of the optimizer."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Have the engine look for the state of its optimizer again."""
        # It keeps views of the moments, of those before a restore.
        self.zero._hp_optimizer_states_linked = False


class _Stage12(_Zero):
    """ZeRO 1 and 2: the weights whole on every rank, the float32 ones cut."""

    def runs(self) -> dict[int, tuple[Run, Tensor | None, int]]:
        """See :class:`_Zero`."""
        own = (dist.get_rank(),)
        found: dict[int, tuple[Run, Tensor | None, int]] = {}
        groups = zip(self.zero.bit16_groups, self.zero.single_partition_of_fp32_groups, strict=True)
        for parameters, flat in groups:
            for parameter in parameters:
                shape = tuple(parameter.shape)
                mapping = parameter._hp_mapping
                start, offset, count = 0, 0, 0
                if mapping is not None:
                    start = mapping.lp_fragment_address.start
                    count = mapping.lp_fragment_address.numel
                    offset = mapping.hp_fragment_address.start
                data = flat.detach()[offset : offset + count]
                run = Run(data, start, shape, own, (parameter.detach(),))
                found[id(parameter)] = (run, flat, offset)
        return found

    def owners(self) -> list[list[Tensor]]:
        """See :class:`_Zero`."""
        return [[flat] for flat in self.zero.single_partition_of_fp32_groups]


class _Stage3(_Zero):
    """ZeRO 3: the weights cut, in low precision and in float32 alike."""

    def runs(self) -> dict[int, tuple[Run, Tensor | None, int]]:
        """See :class:`_Zero`."""
        found: dict[int, tuple[Run, Tensor | None, int]] = {}
        groups = zip(self.zero.fp16_groups, self.zero.fp32_partitioned_groups_flat, strict=True)
        for parameters, flat in groups:
            offset = 0
            for parameter in parameters:
                found[id(parameter)] = (self._run(parameter, flat.detach(), offset), flat, offset)
                offset += parameter.ds_tensor.ds_numel
        for parameter in self.module.parameters():
            if id(parameter) not in found and hasattr(parameter, "ds_tensor"):
                found[id(parameter)] = (self._run(parameter, None, 0), None, 0)
        return found

    def owners(self) -> list[list[Tensor]]:
        """See :class:`_Zero`."""
        groups: list[list[Tensor]] = [[] for _ in self.zero.optimizer.param_groups]
        for index, flat in enumerate(self.zero.fp32_partitioned_groups_flat):
            groups[self.zero.sub_group_to_group_id[index]].append(flat)
        return groups

    def _run(self, parameter: Any, flat: Tensor | None, offset: int) -> Run:
        size = int(parameter.ds_tensor.ds_numel)
        start = size * dist.get_rank(parameter.ds_process_group)
        count = max(min(int(parameter.ds_numel) - start, size), 0)
        shape, own = tuple(parameter.ds_shape), (dist.get_rank(),)
        low = parameter.ds_tensor.detach()[:count]
        start = start if count else 0
        # Small ones are whole on every rank beside.
        whole = (parameter.detach(),) if parameter.numel() == parameter.ds_numel else ()
        if flat is None:
            return Run(low, start, shape, own, whole)
        working = Run(low, start, shape, own)
        return Run(flat[offset : offset + count], start, shape, own, (working, *whole))


class _Counters:
    """The counters of an engine and the scale of its loss.

    Args:
        engine: The engine.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def get(self) -> dict[str, Any]:
        """Return them.

        Raises:
            UnsupportedStateError: In the middle of an accumulation of gradients.
        """
        engine = self._engine
        steps = engine.gradient_accumulation_steps()
        if engine.micro_steps % steps:
            raise UnsupportedStateError(
                f"The engine has accumulated {engine.micro_steps % steps} of {steps} gradients, "
                "which it keeps where nobody can take them.",
                hint="Save after a step of the optimizer.",
            )
        scaler = vars(engine.optimizer.loss_scaler)
        return {
            **{name: getattr(engine, name) for name in _COUNTERS},
            "loss_scaler": {
                name: value for name, value in sorted(scaler.items()) if _is_plain(value)
            },
        }

    def set(self, stored: Mapping[str, Any]) -> None:
        """Take them back."""
        for name in _COUNTERS:
            setattr(self._engine, name, stored[name])
        for name, value in stored["loss_scaler"].items():
            setattr(self._engine.optimizer.loss_scaler, name, value)


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str)
