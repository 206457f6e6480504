"""Folders that torch.distributed.checkpoint wrote: read as they are, and imported."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import pickle
import resource
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import milepost as mp
from milepost.checkpoint import open_source
from milepost.convert.dcp import DcpSource
from milepost.convert.pickle_data import read_pickle
from milepost.importing import import_checkpoint
from milepost.integrations.dcp import StorageReader
from milepost.state.source import load_item
from milepost.testing.asserts import assert_equal_states

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:Detected an exist")


def build(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


RICH = {
    "model": {"a.b": torch.arange(6.0).reshape(2, 3), "c": torch.ones(2).bfloat16()},
    "views": {"t": torch.arange(6.0).reshape(2, 3).T, "part": torch.arange(9)[2:8:2]},
    "numbers": {"int": 3, "big": 1 << 300, "float": 0.1, "none": None},
    "tuple": (1, (2, "x"), torch.arange(3)),
    "words": ["x", "y"],
    "nested": [{"w": torch.zeros(2), "lr": 0.5}, {"w": torch.ones(2), "betas": (0.9, 0.99)}],
    "odd / $": {"$": torch.ones(1), "x/y": torch.zeros(1), "": 7},
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(2, dtype=torch.int64),
    "complex": torch.ones(2, dtype=torch.complex128),
    "bool": torch.tensor([True, False]),
    "float8": torch.ones(3).to(torch.float8_e4m3fn),
    "wide": torch.tensor([1, 2], dtype=torch.uint32),
}


def test_every_kind_of_entry_is_read(tmp_path: Path) -> None:
    """From the folder as it is, and from what it was imported to."""
    dcp.save(RICH, checkpoint_id=tmp_path / "plain")
    source = DcpSource(tmp_path / "plain")
    found = {item: load_item(source, item) for item in source.trees}
    whole = import_checkpoint(tmp_path / "plain", tmp_path / "run")
    assert whole.name == "plain"
    assert whole.verify().is_good
    for state in (found, whole.load()["state"]):
        kinds = ("model", "numbers", "tuple", "words", "nested")
        assert_equal_states(
            {k: RICH[k] for k in kinds if k != "model"},
            {k: state[k] for k in kinds if k != "model"},
        )
        assert_equal_states(RICH["model"], state["model"])
    target = {"views": {"t": torch.zeros(3, 2), "part": torch.zeros(3, dtype=torch.int64)},
              "complex": torch.zeros(2, dtype=torch.complex128), "odd / $": {"$": torch.zeros(1)},
              "wide": torch.zeros(2, dtype=torch.uint32), "float8": torch.zeros(3).to(
                  torch.float8_e4m3fn), "empty": torch.empty(0, 3)}  # fmt: skip
    for place in (tmp_path / "plain", tmp_path / "run"):
        dcp.load(target, storage_reader=StorageReader(place))
        for name in ("complex", "wide", "float8", "empty"):
            assert_equal_states(RICH[name], target[name])
        assert target["views"]["t"].equal(RICH["views"]["t"])
        assert target["views"]["part"].tolist() == [2, 4, 6]
        assert target["odd / $"]["$"].item() == 1


def test_a_training_goes_on_from_a_folder(tmp_path: Path) -> None:
    """Weights and optimizer, straight from the folder and by way of an import."""
    model, optimizer = build()
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(state, checkpoint_id=tmp_path / "step-3")
    imported = import_checkpoint(tmp_path / "step-3", tmp_path / "run")
    plain = load_file(tmp_path / "run" / "step-3" / "model.safetensors")
    assert_equal_states(dict(model.state_dict()), plain)
    for place in (tmp_path / "step-3", imported):
        other, its = build(seed=1)
        with mp.Checkpointer(tmp_path / "new", resume="auto", model=other, optimizer=its) as run:
            run.restore(place, items=["model", "optimizer"])
        assert_equal_states(dict(model.state_dict()), dict(other.state_dict()))
        moments = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
        assert_equal_states(moments, [its.state[p]["exp_avg"] for p in other.parameters()])
        other.zero_grad()
    bare, _ = build(seed=2)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "bare")
    with mp.Checkpointer(tmp_path / "more", model=bare) as run:
        run.load_weights(tmp_path / "bare", bare, strict=True)
    assert_equal_states(dict(model.state_dict()), dict(bare.state_dict()))


def plain_folder(
    folder: Path,
    pieces: dict[str, list[tuple[tuple[int, ...], torch.Tensor]]],
    shapes: dict[str, tuple[int, ...]],
) -> None:
    """Have DCP write tensors in given pieces, as ranks would."""

    class Pieces:
        def __init__(self, name: str) -> None:
            self.name = name

    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties
    from torch.distributed.checkpoint.planner import (
        SavePlan,
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )

    class Planner(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            items = [
                WriteItem(
                    MetadataIndex(name, offsets),
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        ChunkStorageMetadata(torch.Size(offsets), value.shape),
                        TensorProperties(dtype=value.dtype),
                        torch.Size(shapes[name]),
                    ),
                )
                for name, found in pieces.items()
                for offsets, value in found
            ]
            return SavePlan(items, planner_data={name: ("model", name) for name in pieces})

        def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
            return dict(pieces[write_item.index.fqn])[tuple(write_item.index.offset)]

    dcp.save({"x": Pieces("x")}, storage_writer=FileSystemWriter(folder), planner=Planner())


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[list[int]]]:
    """A shape, and where each dimension is cut."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    return shape, [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]


@settings(max_examples=25, deadline=None)
@given(cut=cuts(), transposed=st.booleans(), data=st.data())
def test_pieces_of_any_cut_are_put_together(
    tmp_path_factory: pytest.TempPathFactory,
    cut: tuple[tuple[int, ...], list[list[int]]],
    transposed: bool,
    data: st.DataObject,
) -> None:
    """Any box of them is read, from the folder and after an import, whatever the strides."""
    folder = tmp_path_factory.mktemp("dcp")
    shape, borders = cut
    whole = torch.randn(shape)
    pieces: list[tuple[tuple[int, ...], torch.Tensor]] = [((), whole)]
    for dim, at in enumerate(borders):
        pieces = [
            ((*offsets, low), value.narrow(dim, low, high - low))
            for offsets, value in pieces
            for low, high in itertools.pairwise(at)
        ]
    laid = [
        (offsets, value.transpose(0, -1).contiguous().transpose(0, -1) if transposed else value)
        for offsets, value in pieces
    ]
    plain_folder(folder / "plain", {"w": laid}, {"w": shape})
    import_checkpoint(folder / "plain", folder / "run")
    low = [data.draw(st.integers(0, n - 1)) for n in shape]
    size = [data.draw(st.integers(1, n - o)) for n, o in zip(shape, low, strict=True)]
    wanted = whole[tuple(slice(o, o + n) for o, n in zip(low, size, strict=True))]
    from milepost.tensors.boxes import Box

    for place in (folder / "plain", folder / "run"):
        source = open_source(place)
        into = torch.zeros(size)
        source.read_boxes([("model", "w", Box(tuple(low), tuple(size)), into)])
        assert into.equal(wanted)
        assert load_item(source, "model")["w"].equal(whole)


def test_rows_become_whole_tensors_and_columns_stay_pieces(tmp_path: Path) -> None:
    """The first opens as plain safetensors; both load, and pieces can be joined afterwards."""
    rows, columns = torch.randn(5, 4), torch.randn(4, 6)
    plain_folder(
        tmp_path / "plain",
        {"r": [((0, 0), rows[:3]), ((3, 0), rows[3:])]},
        {"r": (5, 4)},
    )
    import_checkpoint(tmp_path / "plain", tmp_path / "a", name="x")
    assert load_file(tmp_path / "a" / "x" / "model.safetensors")["r"].equal(rows)
    plain_folder(
        tmp_path / "cut",
        {"c": [((0, 0), columns[:, :2]), ((0, 2), columns[:, 2:])], "r": [((0, 0), rows)]},
        {"c": (4, 6), "r": (5, 4)},
    )
    found = import_checkpoint(tmp_path / "cut", tmp_path / "b")
    assert found.verify().is_good
    weights = found.load()["state"]["model"]
    assert weights["c"].equal(columns)
    assert weights["r"].equal(rows)
    joined = mp.consolidate(found, tmp_path / "c", name="x")
    assert load_file(tmp_path / "c" / "x" / "model.safetensors")["c"].equal(columns)
    assert joined.load()["state"]["model"]["c"].equal(columns)


def test_a_load_reads_no_more_than_it_must(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows of a large tensor, and a block of columns, not the whole of it."""
    from milepost.convert.dcp import DcpFiles
    from milepost.tensors.boxes import Box

    whole = torch.randn(512, 65536)
    dcp.save({"w": whole}, checkpoint_id=tmp_path)
    source, read = DcpSource(tmp_path), [0]
    fill = DcpFiles._fill

    def counted(self: Any, file: str, start: int, view: memoryview) -> int:
        read[0] += len(view)
        return fill(self, file, start, view)

    monkeypatch.setattr(DcpFiles, "_fill", counted)
    for box in (Box((3, 0), (2, 65536)), Box((0, 100), (512, 32768))):
        read[0] = 0
        into = torch.empty(box.sizes)
        source.read_boxes([("model", "w", box, into)])
        assert into.equal(whole[box.slices(Box.whole(whole.shape))])
        assert read[0] <= into.numel() * 4 + 16 * 1024


def test_an_import_takes_little_memory(tmp_path: Path) -> None:
    """A folder many times as large as what it may take."""
    dcp.save({f"w{n}": torch.randn(4_000_000) for n in range(6)}, checkpoint_id=tmp_path / "plain")
    program = f"""
from pathlib import Path
from milepost.importing import import_checkpoint
from milepost.convert.dcp import DcpSource

def peak():
    # Not that of getrusage, which begins with the peak of the process that started this one.
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0]) // 1024

DcpSource({str(tmp_path / "plain")!r})
before = peak()
import_checkpoint({str(tmp_path / "plain")!r}, {str(tmp_path / "run")!r})
print(peak() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert 0 < int(done.stdout) < 24  # of 96 MB


def test_a_flipped_bit_is_found_by_an_import(tmp_path: Path) -> None:
    """By the checksum that torch writes and never looks at; nothing is committed."""
    dcp.save({"w": torch.zeros(3_000_000)}, checkpoint_id=tmp_path / "plain")
    file = tmp_path / "plain" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(mp.DamagedError, match="w in"):
        import_checkpoint(tmp_path / "plain", tmp_path / "run")
    assert mp.open_run(tmp_path / "run").checkpoints() == []
    assert not (tmp_path / "run" / "plain").exists()


def test_a_writer_without_checksums_is_read_too(tmp_path: Path) -> None:
    """torch can be told to leave them out."""
    torch.serialization.set_crc32_options(False)
    try:
        dcp.save({"w": torch.arange(5.0), "n": 3}, checkpoint_id=tmp_path / "plain")
    finally:
        torch.serialization.set_crc32_options(True)
    state = import_checkpoint(tmp_path / "plain", tmp_path / "run").load()["state"]
    assert state["model"]["w"].equal(torch.arange(5.0))
    assert state["n"] == 3


def test_an_import_is_only_into_a_new_run(tmp_path: Path) -> None:
    """Into another it would take the run from a training that is on its way."""
    dcp.save({"w": torch.ones(1)}, checkpoint_id=tmp_path / "plain")
    import_checkpoint(tmp_path / "plain", tmp_path / "run", name="first")
    with pytest.raises(mp.ExistsError):
        import_checkpoint(tmp_path / "plain", tmp_path / "run", name="second")
    with pytest.raises(mp.MissingError):
        import_checkpoint(tmp_path / "nothing", tmp_path / "other")
    with pytest.raises(mp.UsageError, match="cannot be the new run"):
        import_checkpoint(tmp_path / "plain", tmp_path / "plain")
    with pytest.raises(mp.MissingError, match="no item"):
        import_checkpoint(tmp_path / "plain", tmp_path / "other", items=["x"])


class Stranger:
    """A class of somebody's own."""


def test_a_class_in_a_value_is_refused_and_can_be_left_out(tmp_path: Path) -> None:
    """Or read with trust, by those who made it."""
    dcp.save({"m": {"w": torch.ones(1)}, "x": {"y": Stranger()}}, checkpoint_id=tmp_path / "plain")
    with pytest.raises(mp.UnsupportedStateError, match=r"x\.y"):
        import_checkpoint(tmp_path / "plain", tmp_path / "run")
    assert not (tmp_path / "run").exists()
    found = import_checkpoint(tmp_path / "plain", tmp_path / "run", items=["m"])
    assert found.manifest.items == ("m",)


def test_a_pt_file_is_imported_too(tmp_path: Path) -> None:
    """As a checkpoint of a new run."""
    model, _ = build()
    torch.save(model.state_dict(), tmp_path / "old.pt")
    found = import_checkpoint(tmp_path / "old.pt", tmp_path / "run")
    assert found.name == "old"
    assert_equal_states(dict(model.state_dict()), found.load()["state"]["model"])


# -- hostile folders ---------------------------------------------------------------------------


def folder_with(folder: Path, change: Callable[[Any], Any]) -> Path:
    """Make a folder of one tensor and one number, and change its metadata."""
    dcp.save({"m": {"w": torch.arange(6.0).reshape(2, 3)}, "n": 5}, checkpoint_id=folder)
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    changed = change(metadata)
    file.write_bytes(changed if isinstance(changed, bytes) else pickle.dumps(metadata))
    return folder


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/milepost-was-here",)


def spoil_bomb(metadata: Any) -> None:
    metadata.planner_data = Bomb()


def spoil_getattr(metadata: Any) -> bytes:
    return b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\x8c\x021+\x85R."


def spoil_deep(metadata: Any) -> bytes:
    return b"\x80\x04" + b"N" + b"\x85" * 300_000 + b"."


def spoil_deep_key(metadata: Any) -> bytes:
    return b"\x80\x04}" + b"N" + b"\x85" * 500_000 + b"K\x01s."


def spoil_memo(metadata: Any) -> bytes:
    return b"\x80\x04Nr\xff\xff\xff\x7f."


def spoil_length(metadata: Any) -> bytes:
    return b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"x."


def spoil_marks(metadata: Any) -> bytes:
    return b"\x80\x04]t."


def spoil_file(name: str) -> Callable[[Any], None]:
    def spoil(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = name

    return spoil


def spoil_offset(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.offset = 10**12


def spoil_negative(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.offset = -5


def spoil_shape(metadata: Any) -> None:
    one = metadata.state_dict_metadata["m.w"]
    one.size = torch.Size((2**40, 3))
    one.chunks[0].sizes = torch.Size((2**40, 3))


def spoil_hole(metadata: Any) -> None:
    metadata.state_dict_metadata["m.w"].size = torch.Size((3, 3))


def spoil_dtype(metadata: Any) -> None:
    metadata.state_dict_metadata["m.w"].properties.dtype = torch.int32


def spoil_list(metadata: Any) -> None:
    metadata.planner_data["m.w"] = ("m", 10**9)


def spoil_clash(metadata: Any) -> None:
    metadata.planner_data = {"m.w": ("m", "a"), "n": ("m", "a", "b")}


def spoil_place(metadata: Any) -> None:
    metadata.storage_data = {}


def spoil_transform(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.transform_descriptors = ["stream.zstd"]


def spoil_all(metadata: Any) -> bytes:
    return pickle.dumps({"a": 1})


def cut_short(metadata: Any) -> bytes:
    return pickle.dumps(metadata)[:-40]


SPOILS: list[tuple[Callable[[Any], Any], type[Exception]]] = [
    (spoil_bomb, mp.UnsupportedStateError),
    (spoil_getattr, mp.UnsupportedStateError),
    (spoil_deep, mp.FormatError),
    (spoil_deep_key, mp.FormatError),
    (spoil_memo, mp.FormatError),
    (spoil_length, mp.FormatError),
    (spoil_marks, mp.FormatError),
    (spoil_file("../outside"), mp.FormatError),
    (spoil_file("/etc/passwd"), mp.FormatError),
    (spoil_file("x/../../y"), mp.FormatError),
    (spoil_file("nothing"), mp.FormatError),
    (spoil_file("."), mp.FormatError),
    (spoil_offset, mp.FormatError),
    (spoil_negative, mp.FormatError),
    (spoil_shape, mp.FormatError),
    (spoil_hole, mp.FormatError),
    (spoil_dtype, mp.FormatError),
    (spoil_list, mp.FormatError),
    (spoil_clash, mp.UnsupportedStateError),
    (spoil_place, mp.FormatError),
    (spoil_transform, mp.UnsupportedStateError),
    (spoil_all, mp.FormatError),
    (cut_short, mp.FormatError),
]


@pytest.mark.parametrize(("spoil", "kind"), SPOILS, ids=lambda one: getattr(one, "__name__", ""))
def test_a_hostile_metadata_is_refused(
    tmp_path: Path, spoil: Callable[[Any], Any], kind: type[Exception]
) -> None:
    """Typed, quickly, without running anything or opening what is not in the folder."""
    folder = folder_with(tmp_path / "plain", spoil)
    with pytest.raises(kind):
        import_checkpoint(folder, tmp_path / "run")
    assert not Path("/tmp/milepost-was-here").exists()
    if (tmp_path / "run").exists():
        assert mp.open_run(tmp_path / "run").checkpoints() == []


def archive(**members: bytes) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        for name, content in members.items():
            file.writestr(f"archive/{name.replace('__', '/').replace('_pkl', '.pkl')}", content)
    return data.getvalue()


def tensor_pickle(shape: tuple[int, ...], strides: tuple[int, ...], first: int = 0) -> bytes:
    value = torch.arange(6.0).reshape(2, 3)
    kept = io.BytesIO()
    torch.save(value, kept)
    with zipfile.ZipFile(kept) as file:
        data = file.read("archive/data.pkl")
    old = b"K\x00K\x02K\x03\x86q\x06K\x03K\x01\x86"
    assert old in data, data
    ints = [b"J" + struct.pack("<i", n) for n in (first, *shape, *strides)]
    new = ints[0] + ints[1] + ints[2] + b"\x86q\x06" + ints[3] + ints[4] + b"\x86"
    return data.replace(old, new)


ARCHIVES = {
    "strides": archive(data_pkl=tensor_pickle((2, 3), (900, 1)), data__0=bytes(24)),
    "first": archive(data_pkl=tensor_pickle((2, 3), (3, 1), 10), data__0=bytes(24)),
    "negative": archive(data_pkl=tensor_pickle((2, 3), (3, -1)), data__0=bytes(24)),
    "shape": archive(data_pkl=tensor_pickle((3, 2), (2, 1)), data__0=bytes(24)),
    "short": archive(data_pkl=tensor_pickle((2, 3), (3, 1)), data__0=bytes(20)),
    "no values": archive(data_pkl=tensor_pickle((2, 3), (3, 1))),
    "no pickle": archive(data__0=bytes(24)),
    "bomb": archive(data_pkl=pickle.dumps(Bomb(), 2), data__0=bytes(24)),
    "number": archive(data_pkl=pickle.dumps(5, 2), data__0=bytes(24)),
    "large": archive(data_pkl=b"\x80\x02N" * 900_000 + b".", data__0=bytes(24)),
    "no archive": bytes(1000),
    "empty": b"",
}


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_a_file_that_is_none_is_refused(tmp_path: Path, kind: str) -> None:
    """Nobody waits for a pipe, and nothing outside of the folder is read."""
    folder = folder_with(tmp_path / "plain", lambda metadata: None)
    file = folder / "__0_0.distcp"
    file.rename(tmp_path / "kept")
    make = {"pipe": os.mkfifo, "folder": os.mkdir}.get(kind)
    make(file) if make else file.symlink_to(tmp_path / "kept")
    with pytest.raises(mp.FormatError, match="no such file"):
        import_checkpoint(folder, tmp_path / "run")


def test_a_link_on_the_way_to_a_file_is_refused(tmp_path: Path) -> None:
    """It leads out of the folder, as a link in place of the file does; a real folder does not."""

    def move(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = "sub/deep/" + info.relative_path

    folder = folder_with(tmp_path / "plain", move)
    deep = folder / "sub" / "deep"
    deep.mkdir(parents=True)
    for file in folder.glob("*.distcp"):
        file.rename(deep / file.name)
    source = open_source(folder)
    assert load_item(source, "m")["w"].shape == (2, 3)
    (folder / "sub").rename(tmp_path / "kept")
    (folder / "sub").symlink_to(tmp_path / "kept")
    with pytest.raises(mp.FormatError, match="no such file"):
        import_checkpoint(folder, tmp_path / "run")
    with pytest.raises(mp.CheckpointError):  # put in the way after the look
        load_item(source, "m")


def test_no_more_files_are_open_than_a_process_may_have(tmp_path: Path) -> None:
    """Large jobs write thousands of files; those that were not read from lately are closed."""
    pieces = {f"w{n}": [((0,), torch.full((2,), float(n)))] for n in range(80)}
    plain_folder(tmp_path / "one", pieces, dict.fromkeys(pieces, (2,)))
    folder = tmp_path / "plain"
    folder.mkdir()
    metadata = FileSystemReader(tmp_path / "one").read_metadata()
    for index, info in metadata.storage_data.items():
        (written,) = (tmp_path / "one").glob(info.relative_path)
        info.relative_path = f"__{index.fqn}.distcp"
        (folder / info.relative_path).write_bytes(written.read_bytes())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 60, limits[1]))
    try:
        loaded = load_item(open_source(folder), "model")
        found = import_checkpoint(folder, tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    weights = found.load()["state"]["model"]
    for n in range(80):
        assert loaded[f"w{n}"].tolist() == weights[f"w{n}"].tolist() == [n, n]


@pytest.mark.parametrize("name", ARCHIVES)
def test_a_hostile_piece_is_refused(tmp_path: Path, name: str) -> None:
    """What a file holds where a piece belongs is looked at before anything is written."""
    content = ARCHIVES[name]

    def spoil(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == "m.w":
                info.relative_path, info.offset, info.length = "bad.distcp", 0, len(content)

    folder = folder_with(tmp_path / "plain", spoil)
    (folder / "bad.distcp").write_bytes(content)
    with pytest.raises((mp.FormatError, mp.UnsupportedStateError)):
        import_checkpoint(folder, tmp_path / "run", items=["m"])
    target = {"m": {"w": torch.zeros(2, 3)}}
    with pytest.raises((mp.FormatError, mp.UnsupportedStateError, dcp.CheckpointException)):
        dcp.load(target, storage_reader=StorageReader(folder))
    assert target["m"]["w"].eq(0).all()
    assert not (tmp_path / "run").exists() or not mp.open_run(tmp_path / "run").checkpoints()
    assert not Path("/tmp/milepost-was-here").exists()


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=60))
def test_any_bytes_are_a_pickle_of_data_or_refused(data: bytes) -> None:
    """With a typed error, whatever they are."""
    with contextlib.suppress(mp.FormatError, mp.UnsupportedStateError):
        read_pickle(data, allowed=frozenset({"a.b"}), where="x")


@settings(max_examples=150, deadline=None)
@given(at=st.integers(0, 10_000), value=st.integers(0, 255))
def test_a_damaged_metadata_is_data_or_refused(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int
) -> None:
    """One byte changed anywhere: never another kind of error."""
    folder = tmp_path_factory.getbasetemp() / "damaged"
    if not folder.exists():
        folder_with(folder, lambda metadata: None)
        (folder / "kept").write_bytes((folder / ".metadata").read_bytes())
    data = bytearray((folder / "kept").read_bytes())
    data[at % len(data)] = value
    (folder / ".metadata").write_bytes(data)
    with contextlib.suppress(mp.FormatError, mp.UnsupportedStateError, mp.MissingError):
        source = DcpSource(folder)
        for item in source.trees:
            load_item(source, item)


def test_the_reader_of_pickles_agrees_with_pythons_on_plain_data() -> None:
    """All protocols that it knows, with shared values and long groups."""
    shared = ["x"]
    value = {
        "none": None, "bools": [True, False], "ints": [0, 255, 256, -1, 2**31, -(2**40), 2**200],
        "floats": [0.5, float("inf")], "text": ["", "a" * 300, "\N{GREEK SMALL LETTER ALPHA}"],
        "bytes": b"\0" * 300, "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
        "shared": [shared, shared], "many": list(range(3000)), 7: {"x": {}}, "short": b"x",
    }  # fmt: skip
    for protocol in (3, 4, 5):
        found = read_pickle(pickle.dumps(value, protocol), allowed=(), where="x")
        assert found == value
        assert found["shared"][0] is found["shared"][1]


def test_the_metadata_says_what_torchs_own_reader_says(tmp_path: Path) -> None:
    """Names, shapes and pieces, for an optimizer of several groups."""
    model, optimizer = build()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": 1})
    state = {"m": model.state_dict(), "o": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=tmp_path)
    theirs = FileSystemReader(tmp_path).read_metadata()
    ours = StorageReader(tmp_path).read_metadata()
    assert set(ours.state_dict_metadata) == set(theirs.state_dict_metadata)
    assert ours.planner_data == theirs.planner_data
    for name, one in theirs.state_dict_metadata.items():
        mine = ours.state_dict_metadata[name]
        assert type(mine) is type(one)
        if hasattr(one, "chunks"):
            assert (mine.size, mine.chunks) == (one.size, one.chunks)
            assert mine.properties.dtype == one.properties.dtype
    assert sorted(DcpSource(tmp_path).trees) == ["m", "o"]
