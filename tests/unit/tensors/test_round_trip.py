"""Tensors and arrays of every kind, through a checkpoint and back, bit for bit."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from milepost.checkpoint import Checkpoint
from milepost.engine.save import Saver, SaveRequest
from milepost.errors import UnsupportedStateError
from milepost.runs import ensure_run, open_session, record_origin
from milepost.stores import LocalStore, MemoryStore
from milepost.tensors.pack import pack_item


def save(store, items):
    """Save values as one checkpoint and return it."""
    session = record_origin(store, open_session(store, ensure_run(store)), None)
    saver = Saver(store, session, on_commit=lambda manifest: manifest)
    packed = [pack_item(name, value) for name, value in items.items()]
    manifest = saver.save(packed, SaveRequest(name="a", reason="manual")).wait()
    return Checkpoint(store, manifest.name)


def through(value, store=None):
    return save(store or MemoryStore(), {"x": value}).load()["state"]["x"]


def bits(tensor):
    """The bytes of the elements in row-major order."""
    if tensor.numel() == 0:
        return b""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def assert_same(found, expected):
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert bits(found) == bits(expected)


def all_dtypes():
    """Every dtype that this torch knows, except the quantized ones and those it cannot fill."""
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return sorted((d for d in found if not str(d).startswith("torch.q")), key=str)


UNSTORABLE = ("bits", "int1", "int2", "int3", "int4", "int5", "int6", "int7", "uint1", "uint2")
UNSTORABLE += ("uint3", "uint4", "uint5", "uint6", "uint7")


def is_storable(dtype):
    name = str(dtype).removeprefix("torch.")
    return not name.startswith("bits") and name not in UNSTORABLE


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [d for d in all_dtypes() if is_storable(d)], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0, 5), (2, 0)], ids=str)
def test_every_dtype_keeps_its_bits(dtype, shape):
    """No detour over another dtype: NaN payloads, signs of zero and wide integers survive."""
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.arange(count, dtype=torch.int64).mul(37).add(129).to(torch.uint8)
    if dtype is torch.bool:
        raw = raw % 2
    value = raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    found = through({"v": value, "again": [value]})
    assert_same(found["v"], value)
    assert found["again"][0] is found["v"] or not count


@pytest.mark.parametrize("dtype", [d for d in all_dtypes() if not is_storable(d)], ids=str)
def test_a_dtype_that_cannot_be_stored_is_refused_by_name(dtype):
    """Better at the save than at the load."""
    value = torch.zeros(8, dtype=torch.uint8).view(dtype) if dtype.itemsize == 1 else None
    if value is None:
        value = torch.zeros(16, dtype=torch.uint8).view(dtype)
    with pytest.raises(UnsupportedStateError, match=r"x\['a'\]"):
        pack_item("x", {"a": value})


def strided_cases():
    base = torch.arange(24.0).reshape(2, 3, 4)
    yield "transposed", torch.arange(12.0).reshape(3, 4).t()
    yield "channels last", torch.randn(1, 2, 3, 4).to(memory_format=torch.channels_last)
    yield "channels last 3d", torch.randn(1, 2, 3, 4, 2).to(memory_format=torch.channels_last_3d)
    yield "permuted", base.permute(2, 0, 1)
    yield "every other", base[:, ::2]
    yield "expanded", torch.tensor([3.0]).expand(1000)
    yield "flipped window", torch.arange(20.0).unfold(0, 5, 2)
    yield "conjugated", torch.tensor([1 + 2j, 3 - 1j]).conj()
    yield "negative view", torch.tensor([1 + 2j, 3 - 1j]).conj().imag
    yield "complex128 transposed", torch.randn(3, 4, dtype=torch.complex128).t()
    yield "fp8 transposed", torch.randn(4, 6).to(torch.float8_e4m3fn).t()


@pytest.mark.parametrize("case", list(strided_cases()), ids=lambda case: case[0])
def test_views_keep_values_and_dense_layouts_keep_strides(case):
    """A kernel may choose another order of sums for another layout, so the layout is state."""
    name, value = case
    found = through({"v": value})["v"]
    assert_same(found, value)
    if name in ("transposed", "channels last", "channels last 3d", "permuted"):
        assert found.stride() == value.stride()
    assert not found.is_conj()
    assert not found.is_neg()
    found.zero_()  # it owns its memory


def test_of_a_view_only_the_view_is_written():
    """A slice of a big tensor must not drag the big one into every checkpoint."""
    store = MemoryStore()
    big = torch.arange(1_000_000.0)
    saved = save(store, {"x": {"a": big[10:20], "b": big[15:25]}})
    assert sum(entry.size_bytes for entry in saved.manifest.files) < 16_384
    found = saved.load()["state"]["x"]
    assert_same(found["a"], big[10:20])
    assert_same(found["b"], big[15:25])


def test_one_tensor_under_several_names_stays_one():
    """Also nested, also a parameter and its detached twin, and never two that only look alike."""
    weight = torch.nn.Parameter(torch.randn(3, 3))
    other = weight.detach().clone()
    store = MemoryStore()
    saved = save(store, {"x": {"a": weight, "b": [weight.detach()], "c": {"d": other}}})
    found = saved.load()["state"]["x"]
    assert found["a"] is found["b"][0]
    assert found["c"]["d"] is not found["a"]
    assert saved.manifest.file("x.safetensors").size_bytes == 4096 + 2 * 36
    transposed = through({"a": weight, "b": weight.detach().t()})
    assert_same(transposed["b"], weight.t())


def test_temporary_tensors_in_the_same_memory_are_not_taken_for_one():
    """A freed tensor's memory is given out again at once; its address says nothing by then."""

    class Lazy:
        def state_dict(self):
            return OrderedDict((str(n), torch.full((64,), float(n))) for n in range(4))

    found = through(Lazy().state_dict())
    assert [found[str(n)][0].item() for n in range(4)] == [0.0, 1.0, 2.0, 3.0]


def test_awkward_keys_stay_apart():
    """Names are data: a slash in a name must not meet a nested name, nor the container's own."""
    value = {
        "a/b": torch.tensor([1.0]),
        "a": {"b": torch.tensor([2.0])},
        "a/b~2": torch.tensor([3.0]),
        "__metadata__": torch.tensor([4.0]),
        "": torch.tensor([5.0]),
        "nul\0 \u2603 \ud800": torch.tensor([6.0]),
        "../../x": torch.tensor([7.0]),
        5: torch.tensor([8.0]),
        "5": torch.tensor([9.0]),
        ("t", 1): torch.tensor([10.0]),
    }
    found = through(value)
    assert list(found) == list(value)
    assert found["a"]["b"].item() == 2.0
    flat = [found[key].item() for key in value if key != "a"]
    assert flat == [1.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0]
    assert through(torch.tensor(3.0)).item() == 3.0


DENSE = torch.tensor([[0.0, 1.0, 0.0, 2.0], [3.0, 0.0, 0.0, 0.0]])
SPARSE = {
    "coo": DENSE.to_sparse,
    "coo not coalesced": lambda: torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 1], [1, 1, 0]]), torch.ones(3), (2, 4)
    ),
    "coo hybrid": lambda: torch.sparse_coo_tensor([[0, 1]], torch.ones(2, 3), (2, 3)),
    "coo empty": lambda: torch.sparse_coo_tensor(size=(5, 6)),
    "csr": DENSE.to_sparse_csr,
    "csc": DENSE.to_sparse_csc,
    "bsr": lambda: DENSE.to_sparse_bsr((2, 2)),
    "bsc": lambda: DENSE.to_sparse_bsc((2, 2)),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", list(SPARSE))
def test_sparse_tensors_keep_layout_indices_and_values(kind):
    """Not coalesced stays so: adding up duplicates would change the bits."""
    value = SPARSE[kind]()
    found = through([value])[0]
    assert (found.layout, found.shape, found.dtype) == (value.layout, value.shape, value.dtype)
    if value.layout is torch.sparse_coo:
        assert found.is_coalesced() == value.is_coalesced()
        assert_same(found._indices(), value._indices())
        assert_same(found._values(), value._values())
    else:
        assert_same(found.values(), value.values())
        assert bits(found.to_dense()) == bits(value.to_dense())


@pytest.mark.filterwarnings("ignore:.*quantiz.*")
def test_quantized_tensors_keep_integers_and_parameters():
    """Per tensor and per channel, without a detour over floats."""
    plain = torch.randn(4, 5)
    cases = [
        torch.quantize_per_tensor(plain, 0.1, 10, torch.quint8),
        torch.quantize_per_tensor(plain, 0.1, 0, torch.qint8),
        torch.quantize_per_tensor(plain, 0.1, 0, torch.qint32),
        torch.quantize_per_channel(
            plain, torch.rand(5) + 0.1, torch.zeros(5, dtype=torch.int64), 1, torch.qint8
        ),
    ]
    for value, found in zip(cases, through(cases), strict=True):
        assert found.dtype == value.dtype
        assert bits(found.int_repr()) == bits(value.int_repr())
        assert found.qscheme() == value.qscheme()
        assert bits(found.dequantize()) == bits(value.dequantize())


def test_generators_and_torch_values_come_back():
    """A generator continues with the draws it would have made."""
    generator = torch.Generator().manual_seed(5)
    torch.rand(3, generator=generator)
    value = {
        "g": generator,
        "d": torch.bfloat16,
        "cpu": torch.device("cpu"),
        "size": torch.Size([2, 3]),
    }
    found = through(value)
    expected = torch.rand(4, generator=generator)
    assert_same(torch.rand(4, generator=found["g"]), expected)
    assert found["d"] is torch.bfloat16
    assert found["cpu"] == torch.device("cpu")
    assert found["size"] == torch.Size([2, 3])
    assert type(found["size"]) is torch.Size


@pytest.mark.parametrize(
    "value",
    [
        np.arange(3),
        np.arange(10_000.0),
        np.arange(10_000.0)[::-2],
        np.asfortranarray(np.arange(9_000.0).reshape(90, 100)),
        np.zeros((0, 4), dtype=np.float32),
        np.array(5.0),
        np.full(30_000, True),
        np.arange(9_000, dtype=">i4"),
        (np.arange(9_000) * 1j).astype(np.complex128),
        np.array(["a", "bc"]),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        np.arange(9_000, dtype=np.uint16),
        np.float64(0.1),
        np.int64(5),
        np.bool_(1),
    ],
    ids=lambda value: f"{value.dtype}{value.shape}",
)
def test_numpy_values_small_and_big_come_back(value):
    """Big ones go where tensors go; small ones stay in the tree. The reader cannot tell."""
    found = through([value])[0]
    assert type(found) is type(value)
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert found.tobytes() == value.tobytes()
    if isinstance(found, np.ndarray) and found.size:
        found.flat[0] = found.flat[-1]  # writable


def test_a_read_only_array_is_stored_and_not_written_to():
    """A view of a file, or of a constant, is state like any other."""
    value = np.arange(20_000.0)
    value.flags.writeable = False
    assert through([value])[0].tobytes() == value.tobytes()


class Tagged(torch.Tensor):
    """A subclass, whose meaning only its own code knows."""


class Unknown:
    """An object that cannot be stored."""


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (torch.empty(3, device="meta"), "meta"),
        (torch.rand(2).as_subclass(Tagged), "Tagged"),
        (torch.nn.Linear(1, 1), "module"),
        (Unknown(), "Unknown"),
        (np.array([Unknown()], dtype=object), "object"),
        (lambda: 0, "function"),
        (torch.nn.parameter.UninitializedParameter(), "one batch"),
    ],
    ids=[
        "meta",
        "subclass",
        "module",
        "object",
        "array of objects",
        "function",
        "lazy",
    ],
)
def test_what_cannot_be_stored_is_refused_with_the_path_to_it(value, word):
    """The message leads to the value in a state of thousands."""
    with pytest.raises(UnsupportedStateError, match=r"callbacks\['a'\]\[1\]\['b'\]") as caught:
        pack_item("callbacks", {"a": [0, {"b": value}]})
    assert word in str(caught.value)
    assert caught.value.facts["path"] == "callbacks['a'][1]['b']"


def test_tensors_under_large_ints_come_back_or_are_named():
    """Their keys have more decimal digits than Python writes."""
    large = 1 << 20_000
    value = {large: torch.ones(2), large + 1: torch.zeros(2), (large,): torch.ones(3)}
    found = through(value)
    assert list(found) == list(value)
    assert all(torch.equal(found[key], value[key]) for key in value)
    with pytest.raises(UnsupportedStateError, match=r"x\[int of too many digits\] is a"):
        pack_item("x", {large: Unknown()})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused_with_the_path_to_them(layout):
    """They have no shape to store; asking for it is an internal error of torch."""
    value = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    with pytest.raises(UnsupportedStateError, match=r"x\['a'\] is a nested tensor.*unbind"):
        pack_item("x", {"a": value})


def tensors():
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
    dtypes += [torch.complex64, torch.complex128, torch.float16, torch.float8_e5m2]

    def make(dtype, shape, seed):
        count = int(np.prod(shape)) * dtype.itemsize
        raw = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
        if dtype is torch.bool:
            raw = raw % 2
        if not count:
            return torch.empty(shape, dtype=dtype)
        value = torch.from_numpy(raw).view(dtype).reshape(shape)
        return value.transpose(0, -1) if seed % 3 == 0 and len(shape) > 1 else value

    shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
    return st.builds(make, st.sampled_from(dtypes), shapes, st.integers(0, 2**32 - 1))


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.binary(max_size=6)
    | st.complex_numbers()
    | tensors()
)
KEYS = st.text(max_size=5) | st.integers(-3, 3) | st.tuples(st.integers(0, 2), st.text(max_size=2))
STATES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=14,
)


def same(left, right):
    """Whether two values are alike to the bit. Written for this test alone."""
    import struct

    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return (left.dtype, left.shape, bits(left)) == (right.dtype, right.shape, bits(right))
    if isinstance(left, dict):
        pairs = zip(left.items(), right.items(), strict=False)
        return len(left) == len(right) and all(same(a, b) for a, b in pairs)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    return left == right


@given(STATES, st.booleans())
@settings(max_examples=60)
def test_any_state_comes_back_bit_for_bit(tmp_path_factory, state, is_local):
    """Whatever people nest in whatever, and wherever it is kept."""
    store = LocalStore(tmp_path_factory.mktemp("s")) if is_local else MemoryStore()
    assert same(through(state, store), state)
