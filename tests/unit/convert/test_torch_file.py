"""Files of ``torch.save``: what is read, and what is refused before it is built."""

from __future__ import annotations

import bz2
import collections
import fractions
import gzip
import io
import lzma
import os
import pickle
import random
import zipfile

import numpy as np
import pytest
import torch

from milepost.convert.torch_file import load_torch_file, torch_file_source
from milepost.errors import AccessError, FormatError, MissingError, UnsupportedStateError


def saved(value) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


class Bomb:
    """Creates a folder when it is unpickled."""

    def __init__(self, path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_plain_data_comes_back(tmp_path):
    """Tensors, containers, numbers, and the RNG states that trainers store."""
    value = {
        "w": torch.arange(6.0).reshape(2, 3),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "ordered": collections.OrderedDict(a=1),
        "counter": collections.Counter("aab"),
        "tuple": (1, 2.5, "x", None, True, b"b"),
        "scalar": np.float32(2.5),
        "flags": np.array([True, False]),
        "text": np.array(["ab", "c"]),
    }
    path = tmp_path / "a.pt"
    path.write_bytes(saved(value))
    read = load_torch_file(path)
    assert read.keys() == value.keys()
    assert torch.equal(read["w"], value["w"])
    assert read["half"].dtype is torch.bfloat16
    assert read["python"] == value["python"]
    assert np.array_equal(read["numpy"][1], value["numpy"][1])
    assert read["numpy"][2:] == value["numpy"][2:]
    assert type(read["ordered"]) is collections.OrderedDict
    assert read["counter"] == value["counter"]
    assert read["tuple"] == value["tuple"]
    assert read["scalar"] == value["scalar"]
    assert type(read["scalar"]) is np.float32
    assert read["flags"].tolist() == [True, False]
    assert read["text"].tolist() == ["ab", "c"]


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.parametrize("name", ["a.pt", "a.pt.gz", "a"])
def test_compression_is_told_by_the_bytes(tmp_path, compress, name):
    """Names are changed by people and by downloads."""
    path = tmp_path / name
    path.write_bytes(compress(saved({"w": torch.ones(3)})))
    assert torch.equal(load_torch_file(path)["w"], torch.ones(3))


def test_an_open_file_is_read_from_where_it_stands():
    """As the single file inside a checkpoint is."""
    file = io.BytesIO(saved(torch.ones(2)))
    assert torch.equal(load_torch_file(file), torch.ones(2))
    assert not file.closed


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_code_is_refused_before_it_runs(tmp_path, compress):
    """A stranger's file must not be able to do anything."""
    trace = tmp_path / "trace"
    path = tmp_path / "a.pt"
    path.write_bytes(compress(saved({"w": torch.ones(1), "x": Bomb(trace)})))
    with pytest.raises(UnsupportedStateError, match="mkdir") as caught:
        load_torch_file(path)
    assert not trace.exists()
    assert "mkdir" in caught.value.facts["refused"]
    assert "trust=True" in caught.value.hint


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (fractions.Fraction(1, 2), "fractions.Fraction"),
        (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        (np.array([object()], dtype=object), "O8"),
        (np.zeros(1, dtype=[("a", "f4")]), "V4"),
        (collections.defaultdict(dict), "collections.defaultdict"),
    ],
)
def test_classes_are_refused_by_name(tmp_path, value, name):
    """The message says which class, so that its owner knows what to leave out."""
    path = tmp_path / "a.pt"
    path.write_bytes(saved(value))
    with pytest.raises(UnsupportedStateError, match=name):
        load_torch_file(path)


class CraftedDtype:
    """A dtype with a state that NumPy would never write."""

    def __init__(self, code, state) -> None:
        self.code, self.state = code, state

    def __reduce__(self):
        return np.dtype, (self.code, False, True), self.state


class CraftedArray:
    """An array that says one thing and holds another."""

    def __init__(self, shape, dtype, data) -> None:
        self.state = (1, shape, dtype, False, data)

    def __reduce__(self):
        return np.zeros(0).__reduce__()[0], (np.ndarray, (0,), b"b"), self.state


@pytest.mark.parametrize(
    ("shape", "code", "data"),
    [
        ((2**40,), "f8", b"\0" * 8),
        ((2,), "f8", b"\0" * 15),
        ((2**62, 4), "f8", b""),
        ((-1,), "f8", b"\0" * 8),
        ((1,), "f8", ["\0"]),
        ((1,), "O", ["x"]),
        ((1,), "V8", b"\0" * 8),
        ((1,), "f8,f8", b"\0" * 16),
        ((1,), "S9999999", b"\0"),
    ],
)
def test_arrays_are_built_from_checked_pieces(tmp_path, shape, code, data):
    """NumPy itself would take a crafted array at its word, and read or free what is not its own."""
    path = tmp_path / "a.pt"
    dtype = CraftedDtype(code, (3, "<", None, None, None, -1, -1, 0))
    path.write_bytes(saved({"x": CraftedArray(shape, dtype, data)}))
    with pytest.raises((FormatError, UnsupportedStateError)):
        load_torch_file(path)


def test_crafted_flags_of_a_dtype_are_dropped(tmp_path):
    """Flags that call numbers object references made NumPy follow them as pointers."""
    path = tmp_path / "a.pt"
    dtype = CraftedDtype("f8", (3, ">", None, None, None, -5, -1, 63))
    path.write_bytes(saved(CraftedArray((2,), dtype, bytes([0x3F, 0xF0, *[0] * 14]))))
    found = load_torch_file(path)
    assert found.tolist() == [1.0, 0.0]
    assert found.dtype.flags == np.dtype("f8").flags
    assert np.dtype("f8").itemsize == 8


def test_arrays_of_every_order_come_back(tmp_path):
    """Fortran order, foreign byte order, empty and scalar arrays."""
    values = {
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "big": np.arange(3, dtype=">i4"),
        "empty": np.empty((0, 2), dtype="f4"),
        "scalar": np.array(5, dtype="u2"),
        "nested": ([np.arange(2)], {"x": (np.arange(3),)}),
        "dtype": np.dtype("f2"),
    }
    path = tmp_path / "a.pt"
    path.write_bytes(saved(values))
    found = load_torch_file(path)
    for name in ("fortran", "big", "empty", "scalar"):
        assert found[name].dtype == values[name].dtype
        assert np.array_equal(found[name], values[name])
        assert found[name].flags.f_contiguous == values[name].flags.f_contiguous
        assert found[name].flags.writeable
    assert found["nested"][0][0].tolist() == [0, 1]
    assert found["nested"][1]["x"][0].tolist() == [0, 1, 2]
    assert found["dtype"] == np.dtype("f2")


def test_a_list_that_holds_itself_comes_to_an_end(tmp_path):
    """Pickles can hold circles."""
    circle: list = [np.arange(2)]
    circle.append(circle)
    path = tmp_path / "a.pt"
    path.write_bytes(saved(circle))
    found = load_torch_file(path)
    assert found[1] is found
    assert found[0].tolist() == [0, 1]


def test_trust_reads_classes_and_says_so(tmp_path, caplog):
    """The owner of a file may open it; the log tells that code ran."""
    path = tmp_path / "a.pt"
    path.write_bytes(saved(fractions.Fraction(1, 2)))
    assert load_torch_file(path, trust=True) == fractions.Fraction(1, 2)
    assert "trust=True" in caplog.text


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x",
        b"not a checkpoint at all" * 10,
        b"PK\x03\x04" + b"\0" * 100,
        saved(torch.ones(100))[:-40],
        gzip.compress(saved(torch.ones(100)))[:-20],
        bz2.compress(saved(torch.ones(100)))[:-20],
        lzma.compress(saved(torch.ones(100)))[:-20],
        b"\x1f\x8b" + b"\0" * 50,
        b"BZh9" + b"\0" * 50,
    ],
    ids=lambda data: f"{len(data)}-{data[:4].hex()}",
)
def test_damage_is_a_format_error(tmp_path, data):
    """Whatever the bytes are, the error is ours and names the file."""
    path = tmp_path / "a.pt"
    path.write_bytes(data)
    with pytest.raises(FormatError, match=r"a\.pt"):
        load_torch_file(path)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_bare_pickle_runs_nothing(tmp_path):
    """A pickle in place of a checkpoint is the oldest trick."""
    path = tmp_path / "a.pt"
    path.write_bytes(pickle.dumps(Bomb(tmp_path / "trace"), protocol=2))
    with pytest.raises((FormatError, UnsupportedStateError)):
        load_torch_file(path)
    assert not (tmp_path / "trace").exists()


def test_a_missing_file_is_missing(tmp_path):
    """Told apart from one that is damaged or refused."""
    with pytest.raises(MissingError):
        load_torch_file(tmp_path / "a.pt")


def test_a_folder_is_no_file(tmp_path):
    """A folder of that name is an error of ours as well."""
    with pytest.raises(OSError, match="Could not read"):
        load_torch_file(tmp_path)


def test_a_refused_file_is_not_missing(tmp_path, monkeypatch):
    """Whoever may not read a file must not be told that it is not there."""
    path = tmp_path / "a.pt"
    path.write_bytes(b"x")

    def refuse(*arguments, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "open", refuse)
    with pytest.raises(AccessError):
        load_torch_file(path)


def test_an_archive_that_expands_without_measure_is_refused(tmp_path):
    """A few kilobytes must not fill the memory: the table of the archive is looked at first."""
    path = tmp_path / "a.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}, protocol=2))
    data = bytearray(path.read_bytes())
    # The size before compression, in the central directory: claim 2 GiB.
    place = data.index(b"PK\x01\x02") + 24
    data[place : place + 4] = (2**31).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(FormatError, match="out of all proportion"):
        load_torch_file(path)


def test_a_stream_that_expands_without_measure_is_refused(tmp_path, monkeypatch):
    """The same for compressed files, while they are unpacked."""
    from milepost.convert import torch_file

    monkeypatch.setattr(torch_file, "_MAX_FREE_BYTES", 1 << 20)
    monkeypatch.setattr(torch_file, "_MAX_RATIO", 10)
    path = tmp_path / "a.pt.gz"
    path.write_bytes(gzip.compress(bytes(64 << 20)))
    with pytest.raises(FormatError, match="out of all proportion"):
        load_torch_file(path)


def test_source_offers_the_items(tmp_path):
    """Objects are restored from it like from any checkpoint."""
    path = tmp_path / "a.pt"
    path.write_bytes(saved({"state": {"model": {"w": torch.arange(3.0)}}, "rng": []}))
    source = torch_file_source(path)
    assert list(source.trees) == ["model"]
    target = torch.zeros(3)
    source.read([("model", "w", target)])
    assert target.tolist() == [0.0, 1.0, 2.0]
