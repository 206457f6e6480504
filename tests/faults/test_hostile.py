"""A checkpoint from a stranger: opening it runs no code, takes little, and ends in a typed error.

Every checksum and seal is right, as whoever makes such a file would see to.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

import milepost as mp
from milepost.checkpoint import Checkpoint
from milepost.format import canonical
from milepost.format.frames import CODEC, padded
from milepost.stores import MemoryStore

BLOCK = 8 * 1024 * 1024
MAX_CPU_S = 2.0
MAX_EXTRA_MIB = 300.0


def run_objects():
    """What the reader has, in a state that it likes."""
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    loader = torch.utils.data.DataLoader(torch.arange(4.0), 2)
    value = {"x": 1, "t": torch.arange(4.0)}
    box = (lambda: value, lambda _: None)
    return {"model": model, "optimizer": optimizer, "box": box, "loader": loader}


class Made:
    """A checkpoint that can be altered at will and sealed again."""

    def __init__(self, folder):
        self.folder = folder
        with mp.Checkpointer(folder, **run_objects()) as run:
            run.save("a", wait=True)
        self.path = Path(folder) / "a"
        self.index = json.loads((self.path / "index.json").read_bytes())
        self.manifest = json.loads((self.path / "manifest.json").read_bytes())
        self.manifest.pop("digest")
        self.raw_index = None
        self.last = {}

    def tree(self, item):
        return self.index["items"][item]["tree"]

    def set_tree(self, item, tree):
        self.index["items"][item]["tree"] = tree

    def write(self, file, data):
        """Replace a file, with the right size and checksums."""
        path = self.path / file
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        blocks = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]
        entry = {
            "path": file,
            "size": len(data),
            "crc32c": "".join(f"{crc32c(block):08x}" for block in blocks),
        }
        others = [one for one in self.manifest["files"] if one["path"] != file]
        self.manifest["files"] = [*others, entry]

    def write_part(self, file, header, data=b"", *, length=None):
        body = header if isinstance(header, bytes) else json.dumps(header).encode()
        size = len(body) if length is None else length
        self.write(file, size.to_bytes(8, "little") + body + data)

    def seal(self):
        """Write index and manifest."""
        raw = self.raw_index
        self.write("index.json", json.dumps(self.index).encode() if raw is None else raw)
        (self.path / "manifest.json").unlink()
        (self.path / "manifest.json").write_bytes(
            canonical.dump_record({**self.manifest, **self.last})
        )


class Canary:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


def bomb(made):
    return pickle.dumps(Canary(made.folder / "canary"))


def tensor_tag(**extra):
    return {"$": "tensor", "key": "t", **extra}


def with_box(value):
    """A case in which the state of the box is another one."""
    return lambda made: made.set_tree("box", {"x": value})


def entry(dtype="F32", shape=(4,), offsets=(0, 16)):
    return {"t": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}}


def with_part(header, data=bytes(16), **options):
    return lambda made: made.write_part("box.safetensors", header, data, **options)


def set_manifest(**fields):
    return lambda made: made.manifest.update(fields)


def set_file(position, **fields):
    return lambda made: made.manifest["files"][position].update(fields)


def raw_index(make):
    def change(made):
        made.raw_index = make(made)

    return change


def deep(made):
    made.raw_index = (
        b'{"format":1,"items":{"box":{"files":[],"tree":' + b"[" * 50_000 + b"]" * 50_000 + b"}}}"
    )


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


def doubled(made):
    text = json.dumps(made.index)
    made.raw_index = text.replace('"format": 1', '"format": 1, "format": 1').encode()


def outside(kind):
    """A part that is a link to a file outside of the run."""

    def change(made):
        target = made.folder.parent / "secret"
        target.write_bytes((made.path / "box.safetensors").read_bytes())
        (made.path / "box.safetensors").unlink()
        if kind == "file":
            (made.path / "box.safetensors").symlink_to(target)
        else:
            (made.path / "box.safetensors").symlink_to("/dev/zero")

    return change


def pickled_manifest(made):
    made.sealed = bomb(made)


def set_index(**fields):
    return lambda made: made.index.update(fields)


def set_item(item, **fields):
    return lambda made: made.index["items"][item].update(fields)


def numpy_tag(dtype="<f4", shape=(1,), data=b"1234"):
    tag = {"$": "numpy", "dtype": dtype, "v": base64.b64encode(data).decode()}
    return {**tag, "shape": None if shape is None else list(shape)}


def sparse(**fields):
    tag = {"$": "sparse_coo", "size": [4], "coalesced": True}
    return {**tag, "indices": tensor_tag(), "values": tensor_tag(), **fields}


INDICES = entry("I64", (1, 2), (0, 16))


def sparse_with_indices(size, indices):
    """A sparse tensor whose indices lead out of it."""

    def change(made):
        header = {
            "i": {"dtype": "I64", "shape": [1, 2], "data_offsets": [0, 16]},
            "v": {"dtype": "F32", "shape": [2], "data_offsets": [16, 24]},
        }
        data = b"".join(one.to_bytes(8, "little", signed=True) for one in indices) + bytes(8)
        made.write_part("box.safetensors", header, data)
        tag = sparse(size=size, indices=tensor_tag(key="i"), values=tensor_tag(key="v"))
        made.set_tree("box", {"x": tag})

    return change


def many_tensors(count):
    def change(made):
        text = ",".join(
            f'"t{n}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for n in range(count)
        )
        made.write_part("box.safetensors", b"{" + text.encode() + b"}")

    return change


def framed(num_blocks, **wrong):
    """A compressed part of nothing that announces so many blocks of 8 MiB."""

    def change(made):
        made.write("box.safetensors", bytes(padded(1) * (num_blocks - 1) + 1))
        made.manifest["files"][-1]["frames"] = {
            "codec": CODEC,
            "size": num_blocks * BLOCK,
            "crc32c": "0" * 8 * num_blocks,
            "lengths": [1] * num_blocks,
            "frame_crc32c": f"{crc32c(bytes(1)):08x}" * num_blocks,
            **wrong,
        }
        made.manifest["format"] = 2

    return change


REFUSED = {
    # compressed parts
    "frames of nothing that announce 8 GiB": framed(1024),
    "frames of a negative length": framed(2, lengths=[-1, 1]),
    "frames beyond every file": framed(1, size=2**62),
    "frames of a codec that is a list": framed(1, codec=["zstd"]),
    "frames that are fewer than the blocks": framed(4, lengths=[1]),
    # the container
    "header length beyond everything": with_part(b"{}", length=2**63),
    "header length beyond the file": with_part(b"{}", length=10_000),
    "header length zero": with_part(b"", length=0),
    "no header at all": lambda made: made.write("box.safetensors", b"abc"),
    "empty part": lambda made: made.write("box.safetensors", b""),
    "header is no JSON": with_part(b"{nonsense"),
    "header is a list": with_part(b"[1,2]"),
    "header of lists": with_part(b"{" + b'"a":[' * 20_000),
    "header twice the key": with_part(b'{"t":1,"t":2}'),
    "rank bomb": with_part(entry(shape=[1] * 100_000)),
    "shape of negative numbers": with_part(entry(shape=[-4], offsets=[0, 16])),
    "shape of two negative numbers": with_part(entry(shape=[-2, -2])),
    "shape of floats": with_part(entry(shape=[4.0])),
    "shape of truths": with_part(entry(shape=[True, 4])),
    "shape that wraps around": with_part(entry(shape=[2**62, 4, 2**62], offsets=[0, 0]), b""),
    "shape beyond every memory": with_part(entry(shape=[2**40], offsets=[0, 2**42])),
    "empty and beyond every memory": with_part(entry(shape=[2**62, 2**62, 0], offsets=[0, 0]), b""),
    "offsets backwards": with_part(entry(offsets=[16, 0])),
    "offsets with a gap": with_part(entry(offsets=[4, 20]), bytes(20)),
    "offsets beyond the file": with_part(entry(shape=[400], offsets=[0, 1600])),
    "more bytes than described": with_part(entry(), bytes(64)),
    "an unknown dtype": with_part(entry("F128")),
    "a dtype that is an attribute": with_part(entry("__class__")),
    "a dtype that is a list": with_part(entry(["F32"])),
    "a pickle for a part": lambda made: made.write("box.safetensors", bomb(made)),
    # the manifest
    "a file above the folder": set_file(0, path="../../secret"),
    "an absolute file": set_file(0, path="/etc/passwd"),
    "a file of another checkpoint": set_file(0, path="b/../../x"),
    "a file with a drive": set_file(0, path="C:\\x"),
    "a negative size": set_file(0, size=-1),
    "a size beyond everything": set_file(0, size=2**61),
    "a size without checksums": set_file(0, size=2**40),
    "a size that lies": set_file(0, size=17),
    "a size that is text": set_file(0, size="17"),
    "checksums that are none": set_file(0, crc32c="xyz"),
    "a link to a folder above": set_file(0, linked_from="../../x"),
    "a name above the run": set_manifest(name="../x"),
    "a parent above the run": set_manifest(parent="../../x"),
    "files that are none": lambda made: made.last.update(files=5),
    "a newer format": set_manifest(format=999),
    "no format": set_manifest(format="1"),
    "metrics that are a list": set_manifest(metrics=[1]),
    "a pickle for a manifest": pickled_manifest,
    # the index
    "a pickle for an index": raw_index(bomb),
    "an index of lists": deep,
    "an index with a key twice": doubled,
    "an index that is a number": raw_index(lambda _: b"1"),
    "an index in another encoding": raw_index(lambda made: json.dumps(made.index).encode("utf-16")),
    "an index with a huge number": raw_index(lambda _: b'{"format":' + b"9" * 100_000 + b"}"),
    "an index of a newer format": set_index(format=2),
    "items that are none": set_index(items=[]),
    "an item that is none": set_index(items={"box": 5}),
    "an item with files above": set_item("box", files=["../../secret"]),
    "an item with files that are numbers": set_item("box", files=[5]),
    "an item with files that are lists": set_item("box", files=[["a"]]),
    "a part twice": set_item("box", files=["box.safetensors", "box.safetensors"]),
    "a part of another item": set_item("box", files=["model.safetensors"]),
    "a JSON file for a part": set_item("box", files=["index.json"]),
    # the trees
    "a tag that is not known": with_box({"$": "os.system", "v": "touch canary"}),
    "a tag that is a list": with_box({"$": ["tensor"], "key": "t"}),
    "a tag that is a dict": with_box({"$": {"a": 1}}),
    "a tag that is a number": with_box({"$": 1}),
    "a class by name": with_box({"$": "custom", "tag": "builtins.eval", "v": "1"}),
    "a class by list": with_box({"$": "custom", "tag": ["x"], "v": "1"}),
    "nesting just too deep": with_box(nested(150)),
    "a tensor without a key": with_box({"$": "tensor"}),
    "a tensor with a number for a key": with_box({"$": "tensor", "key": 5}),
    "a tensor that is not there": with_box(tensor_tag(key="nowhere")),
    "a dtype by attribute": with_box({"$": "torch.dtype", "v": "__class__"}),
    "a dtype by path": with_box({"$": "torch.dtype", "v": "nn.Linear"}),
    "a tensor of no dtype": with_box(tensor_tag(dtype="__class__")),
    "a tensor of a list of dtypes": with_box(tensor_tag(dtype=["float32"])),
    "a tensor of another dtype": with_box(tensor_tag(dtype="complex128")),
    "a stride bomb": with_box(tensor_tag(stride=[2**62])),
    "a negative stride": with_box(tensor_tag(stride=[-1])),
    "strides of text": with_box(tensor_tag(stride=["1"])),
    "strides that are a number": with_box(tensor_tag(stride=1)),
    "too many strides": with_box(tensor_tag(stride=[1, 1])),
    "sparse beyond its size": sparse_with_indices([4], [0, 7]),
    "sparse with negative indices": sparse_with_indices([4], [-1, 2]),
    "sparse that is not coalesced": sparse_with_indices([4], [2, 1]),
    "sparse of no size": sparse_with_indices(5, [0, 1]),
    "sparse of negative size": sparse_with_indices([-4], [0, 1]),
    "sparse beyond every number": sparse_with_indices([2**70], [0, 1]),
    "sparse without indices": with_box(sparse(indices=None)),
    "compressed of no layout": with_box(
        {
            "$": "sparse_compressed",
            "layout": "strided",
            "size": [2, 2],
            "compressed": tensor_tag(),
            "plain": tensor_tag(),
            "values": tensor_tag(),
        }
    ),
    "compressed that lies": with_box(
        {
            "$": "sparse_compressed",
            "layout": "sparse_csr",
            "size": [2, 2],
            "compressed": tensor_tag(),
            "plain": tensor_tag(),
            "values": tensor_tag(),
        }
    ),
    "quantized of floats": with_box(
        {"$": "quantized", "dtype": "qint8", "ints": tensor_tag(), "scale": 1.0, "zero_point": 0}
    ),
    "quantized by text": with_box(
        {"$": "quantized", "dtype": "qint8", "ints": tensor_tag(), "scale": "x", "zero_point": 0}
    ),
    "a generator of no state": with_box(
        {"$": "torch.Generator", "device": "cpu", "state": tensor_tag()}
    ),
    "a generator of no device": with_box(
        {"$": "torch.Generator", "device": "nonsense", "state": tensor_tag()}
    ),
    "a generator elsewhere": with_box(
        {"$": "torch.Generator", "device": "cuda:7", "state": tensor_tag()}
    ),
    "a device of nothing": with_box({"$": "torch.device", "v": "__class__"}),
    "a device by list": with_box({"$": "torch.device", "v": ["cpu"]}),
    "a size of text": with_box({"$": "torch.Size", "v": "abc"}),
    "numpy objects": with_box(numpy_tag("|O", (1,), bytes(8))),
    "numpy records": with_box(numpy_tag("V4")),
    "numpy of no dtype": with_box(numpy_tag("__class__")),
    "numpy beyond its bytes": with_box(numpy_tag(shape=(2**40,))),
    "numpy of a negative shape": with_box(numpy_tag(shape=(-1,))),
    "numpy that wraps around": with_box(numpy_tag(shape=(2**62, 4, 2**62))),
    "numpy text of huge items": with_box(numpy_tag("<U999999999", (1,), b"")),
    "bytes that are none": with_box({"$": "bytes", "v": "***"}),
    "bytes of a number": with_box({"$": "bytes", "v": 5}),
    "a set of lists": with_box({"$": "set", "v": [[1]]}),
    "a dict of lists": with_box({"$": "dict", "items": [[[1], 2]]}),
    "a dict of single things": with_box({"$": "dict", "items": [[1]]}),
    "a deque of text": with_box({"$": "deque", "v": [], "maxlen": "x"}),
    "a float of no bits": with_box({"$": "float", "bits": "00"}),
    "a date that is none": with_box({"$": "date", "v": "yesterday"}),
    "a time beyond time": with_box({"$": "timedelta", "v": [10**12, 0, 0]}),
    "a range of text": with_box({"$": "range", "v": ["a"]}),
    "a complex of one": with_box({"$": "complex", "v": [1]}),
    "a path of numbers": with_box({"$": "path", "v": 5}),
    "links out of the run": outside("file"),
    "links to a device": outside("device"),
}

# What is whole as such, and does not fit whoever resumes from it.
MISFITS = {
    "a timer that is a list": lambda made: made.set_tree("timer", []),
    "a timer of text": lambda made: made.set_tree("timer", {"epoch": "x"}),
    "a timer without counters": lambda made: made.set_tree("timer", {}),
    "a loader that is a number": lambda made: made.set_tree("loader", 5),
    "a loader of no kind": lambda made: made.set_tree("loader", {"kind": "x"}),
    "a loader far away": lambda made: made.tree("loader").update(position=10**15, is_open=True),
    "a loader of text": lambda made: made.tree("loader").update(position="5", is_open=True),
    "a loader without a start": lambda made: made.tree("loader").update(position=1, start=None),
    "an optimizer that is a list": lambda made: made.set_tree("optimizer", [1]),
    "an optimizer of numbers": lambda made: made.set_tree(
        "optimizer", {"state": 1, "param_groups": 2}
    ),
    "an optimizer of groups of numbers": lambda made: made.tree("optimizer").update(
        param_groups=[1]
    ),
    "an optimizer of nameless parameters": lambda made: made.tree("optimizer").update(
        param_groups=[{"params": 5}]
    ),
    "an optimizer of lists of names": lambda made: made.tree("optimizer").update(
        param_groups=[{"params": [["a"]]}]
    ),
    "a model that is a number": lambda made: made.set_tree("model", 5),
    "a model of tuples": lambda made: made.set_tree("model", {"$": "tuple", "v": []}),
    "a model of numbers": lambda made: made.set_tree("model", {"weight": 1, "bias": [2]}),
    "a model of a list of dtypes": lambda made: made.tree("model")["weight"].update(dtype=["x"]),
    "a model of no dtype": lambda made: made.tree("model")["weight"].update(dtype="qint8"),
    "a model without a tensor": lambda made: made.tree("model")["weight"].update(key="nowhere"),
    "generators that are a number": lambda made: made.set_tree("rng", 5),
    "generators of nothing": lambda made: made.set_tree("rng", [{}]),
    "generators of text": lambda made: made.set_tree("rng", {"a": "b"}),
    "a setup that is a number": lambda made: made.set_tree("setup", 5),
    "a setup of numbers": lambda made: made.set_tree("setup", {"classes": 1, "models": 2}),
    "modes of text": lambda made: made.set_tree("setup", {"classes": {}, "models": {"model": "a"}}),
    "generators without torch": lambda made: made.tree("rng")[0].update(torch=5),
    "gradients of nobody": lambda made: made.index["items"].update(
        gradients={"files": [], "tree": [1]}
    ),
}


@pytest.fixture(scope="module")
def reader():
    """The victim."""
    script = Path(__file__).with_name("hostile_reader.py")
    process = subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def read(path):
        process.stdin.write(f"{path}\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    yield read
    process.stdin.close()
    assert process.wait(30) == 0
    process.stdout.close()


def make(folder, change):
    folder.mkdir()
    made = Made(folder)
    made.sealed = None
    change(made)
    made.seal()
    if made.sealed is not None:
        (made.path / "manifest.json").write_bytes(made.sealed)
    return made


def assert_harmless(told, folder):
    """No code has run, and it took little of time and memory."""
    assert "ends" in told, told
    assert not [end for end in told["ends"].values() if end.startswith("untyped")], told
    assert told["cpu_s"] < MAX_CPU_S, told
    assert told["extra_mib"] < MAX_EXTRA_MIB, told
    assert not (folder / "canary").exists()
    assert not Path("canary").exists()


def test_the_untouched_checkpoint_is_fine(tmp_path, reader):
    """Otherwise the refusals below would prove nothing."""
    made = make(tmp_path / "run", lambda made: None)
    told = reader(made.folder)
    assert told["ends"] == {
        "load": "done",
        "verify": "good",
        "load_weights": "done",
        "resume": "done",
    }
    assert_harmless(told, made.folder)


@pytest.mark.parametrize("case", list(REFUSED))
def test_hostile_bytes_are_refused(tmp_path, reader, case):
    """With an error of the tree, before anything large is made of them."""
    made = make(tmp_path / "run", REFUSED[case])
    told = reader(made.folder)
    assert_harmless(told, made.folder)
    assert told["ends"]["load"] != "done", told
    assert told["ends"]["resume"] != "done", told


@pytest.mark.parametrize("case", list(MISFITS))
def test_hostile_state_is_refused_by_whoever_resumes(tmp_path, reader, case):
    """Whole records of nonsense: typed errors there, too."""
    made = make(tmp_path / "run", MISFITS[case])
    told = reader(made.folder)
    assert_harmless(told, made.folder)
    assert told["ends"]["resume"] not in ("done", "good"), told


@pytest.mark.parametrize("count", [20_000])
def test_a_header_of_many_empty_tensors_stays_within_bounds(tmp_path, reader, count):
    """It is valid; what it takes must stay in proportion to its size."""
    made = make(tmp_path / "run", many_tensors(count))
    told = reader(made.folder)
    assert "ends" in told
    assert told["extra_mib"] < MAX_EXTRA_MIB, told


def test_a_header_bomb_is_refused(tmp_path, reader):
    """A million empty tensors in a header just below the size that is read."""
    made = make(tmp_path / "run", many_tensors(1_000_000))
    told = reader(made.folder)
    assert_harmless(told, made.folder)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)
TAGS = [
    "tensor",
    "numpy.tensor",
    "sparse_coo",
    "sparse_compressed",
    "quantized",
    "torch.dtype",
    "torch.device",
    "torch.Size",
    "torch.Generator",
    "tuple",
    "set",
    "dict",
    "numpy",
    "custom",
    "bytes",
    "float",
    "complex",
    "range",
    "deque",
    "counter",
    "ordered_dict",
    "date",
    "path",
]
FIELDS = [
    "v",
    "key",
    "dtype",
    "stride",
    "shape",
    "size",
    "items",
    "tag",
    "indices",
    "values",
    "layout",
    "ints",
    "scale",
    "zero_point",
    "axis",
    "state",
    "device",
    "tensor",
    "bits",
    "maxlen",
]
TAGGED = st.recursive(
    JSON | st.just(tensor_tag()),
    lambda inner: st.builds(
        lambda tag, fields: {**fields, "$": tag},
        st.sampled_from(TAGS),
        st.dictionaries(st.sampled_from(FIELDS), inner, max_size=6),
    ),
    max_leaves=10,
)


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A checkpoint in memory, whose index is rewritten for every example."""
    made = make(tmp_path_factory.mktemp("template") / "run", lambda made: None)
    store = MemoryStore()
    for path in made.path.iterdir():
        store.put(f"a/{path.name}", path.read_bytes())
    return made, store


@given(TAGGED)
@settings(max_examples=300)
def test_any_tree_is_loaded_or_refused(template, tree):
    """Tags of the right names and wrong fields, nested in each other."""
    made, store = template
    index = {**made.index, "items": {**made.index["items"]}}
    index["items"]["box"] = {"tree": {"x": tree}, "files": ["box.safetensors"]}
    load_with(made, store, json.dumps(index).encode())


def mutated(seed):
    def change(data):
        source, data = random.Random(seed), bytearray(data)
        for _ in range(source.randint(1, 6)):
            at = source.randrange(len(data))
            kind = source.randrange(3)
            if kind == 0:
                data[at] = source.choice(b'{}[]",:0123456789-eE$truefalsn')
            elif kind == 1:
                del data[at : at + source.randint(1, 30)]
            else:
                data[at:at] = data[source.randrange(len(data)) :][: source.randint(1, 30)]
        return bytes(data)

    return change


@given(st.binary(max_size=200) | st.integers(0, 2**32).map(mutated))
@settings(max_examples=200)
def test_any_bytes_for_an_index_are_loaded_or_refused(template, change):
    """Random bytes, and the true index with some of its bytes changed."""
    made, store = template
    data = change(json.dumps(made.index).encode()) if callable(change) else change
    load_with(made, store, data)


def load_with(made, store, data):
    """Load with another index, rightly sealed."""
    files = [one for one in made.manifest["files"] if one["path"] != "index.json"]
    checksum = f"{crc32c(data):08x}" if data else ""
    files.append({"path": "index.json", "size": len(data), "crc32c": checksum})
    store.put("a/index.json", data)
    store.put("a/manifest.json", canonical.dump_record({**made.manifest, "files": files}))
    model = torch.nn.Linear(2, 2)
    for action in (Checkpoint.load, lambda one: one.load_weights(model, strict=False)):
        try:
            action(Checkpoint(store, "a"))
        except mp.CheckpointError:
            continue
