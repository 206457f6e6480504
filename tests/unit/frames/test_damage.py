"""Frames that are damaged or made to do harm are refused, and never leave their block."""

from __future__ import annotations

import copy
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from milepost import errors
from milepost.engine.framing import FrameCost, FrameStream, Packing
from milepost.errors import DamagedError, FormatError, StorageError
from milepost.format.digest import BLOCK_BYTES, block_count, crc32c
from milepost.format.frames import Frames
from milepost.format.manifest import FileEntry
from milepost.frames.codec import CHUNK_BYTES, compress, decompress
from milepost.frames.reader import open_plain
from milepost.stores.local import LocalStore
from milepost.stores.memory import MemoryStore
from milepost.stores.pages import page_memory

WEIGHTS = (torch.randn(5_500_000, generator=torch.Generator().manual_seed(3)) * 0.02).numpy()
PLAIN = WEIGHTS.tobytes()[: 2 * BLOCK_BYTES + 123_457]


def write(store, *, plain=PLAIN, order=None, method="zstd", key="a"):
    """Write a compressed file, its blocks in some order, and return its entry."""
    packing = Packing(method, [4] * block_count(len(plain)))
    writer = store.create_writer(key, len(plain))
    stream = FrameStream(writer, len(plain), packing=packing, cost=FrameCost(), key=key)
    for block in order or range(block_count(len(plain))):
        start = block * BLOCK_BYTES
        data = memoryview(plain)[start : start + BLOCK_BYTES]
        stream.take(block, data, crc32c(data))
    stream.close()
    return stream.entry(key)


def read(store, entry, key="a"):
    reader = open_plain(store, key, entry)
    try:
        pages = memoryview(page_memory(reader.size_bytes))[: reader.size_bytes]
        reader.read_into(0, pages)
        return bytes(pages)
    finally:
        reader.close()


@pytest.mark.parametrize("make", [LocalStore, lambda _: MemoryStore()], ids=["disk", "memory"])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)], ids=str)
def test_frames_land_in_order_whoever_is_first(tmp_path, make, order):
    """Threads end when they end; where a frame begins is decided by those before it."""
    store = make(tmp_path)
    entry = write(store, order=order)
    assert entry == write(make(tmp_path / "straight"))
    assert read(store, entry) == PLAIN
    reader = open_plain(store, "a", entry)
    lent = reader.lend(BLOCK_BYTES + 5, 200_000) if hasattr(reader, "lend") else None
    if lent is not None:
        assert bytes(lent) == PLAIN[BLOCK_BYTES + 5 :][:200_000]
    reader.close()


def test_a_flipped_bit_anywhere_in_a_frame_is_found_before_it_is_decompressed(tmp_path):
    """A decompressor that is fed damaged bytes may do anything."""
    store = LocalStore(tmp_path)
    entry = write(store)
    path, data = tmp_path / "a", (tmp_path / "a").read_bytes()
    starts = entry.frames.starts()
    for block, length in enumerate(entry.frames.lengths):
        for at in (0, 2, 5, 13, 22, 31, 40, length // 2, length - 1):
            damaged = bytearray(data)
            damaged[starts[block] + at] ^= 4
            path.write_bytes(damaged)
            with pytest.raises(DamagedError, match=f"Frame {block} of a ") as caught:
                read(store, entry)
            assert caught.value.facts["block"] == block
    for cut in (0, 1, 4096, len(data) - 1):
        path.write_bytes(data[:cut])
        with pytest.raises(DamagedError, match="bytes"):
            read(store, entry)


def test_one_bad_answer_is_asked_for_again(tmp_path):
    """Bytes may be altered on the way; what is on the disk is still right."""
    store = LocalStore(tmp_path)
    entry = write(store)

    class Once:
        """Alters the first answer."""

        def __init__(self, reader):
            self.reader, self.size_bytes, self.is_bad = reader, reader.size_bytes, True

        def read_into(self, offset, buffer):
            self.reader.read_into(offset, buffer)
            buffer[10] ^= self.is_bad
            self.is_bad = False

        def close(self):
            self.reader.close()

    class Altering:
        def open_reader(self, key):
            return Once(store.open_reader(key))

    assert read(Altering(), entry) == PLAIN


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
@pytest.mark.parametrize("at", [5, BLOCK_BYTES - 1, BLOCK_BYTES, -1], ids=str)
def test_a_bit_that_flips_before_a_block_is_written_fails_the_save(monkeypatch, order, at):
    """The checksum of the stored block would call it right, and no reader could load it."""
    plain, copy = PLAIN[: BLOCK_BYTES + 5_000_000], FrameStream._write
    stored_bytes = write(MemoryStore(), plain=plain).size_bytes
    position = at % stored_bytes

    def flip_and_write(self, offset, data, *landed):
        if offset <= position < offset + len(data):
            data[position - offset] ^= 8
        copy(self, offset, data, *landed)

    monkeypatch.setattr(FrameStream, "_write", flip_and_write)
    with pytest.raises(StorageError, match="a changed in memory"):
        write(MemoryStore(), plain=plain, order=order)


FRAME = b"".join(compress(memoryview(PLAIN)[: CHUNK_BYTES + 70_001], method="zstd", item_bytes=4))
LZ4_FRAME = b"".join(
    compress(memoryview(PLAIN)[: CHUNK_BYTES + 70_001], method="lz4", item_bytes=4)
)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([FRAME, LZ4_FRAME]),
    st.lists(
        st.tuples(
            st.one_of(st.integers(0, 80), st.integers(0, len(FRAME) - 1)), st.integers(0, 255)
        ),
        max_size=6,
    ),
    st.one_of(st.none(), st.integers(0, len(FRAME))),
)
def test_a_hostile_frame_fills_its_block_or_is_refused(frame, changes, stop):
    """Its checksum proves nothing where the manifest is a stranger's."""
    hostile = bytearray(frame)
    for at, value in changes:
        hostile[at] = value
    guard, size = 100_000, CHUNK_BYTES + 70_001
    memory = bytearray(b"\xa5") * (size + 2 * guard)
    with suppress(FormatError):
        place = memoryview(memory)[guard : guard + size]
        decompress(memoryview(hostile)[:stop], place, where="a")
    assert memory[:guard] == memory[-guard:] == b"\xa5" * guard


@pytest.mark.parametrize("method", ["zstd", "lz4"])
@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8])
def test_blocks_of_any_size_come_back(method, item_bytes):
    """The library makes what it cannot read of blocks that end within an element."""
    for size in (1, 5, 33, 4_097, 123_457, 524_289, 1_000_001, CHUNK_BYTES + 1):
        chunks = compress(memoryview(PLAIN)[:size], method=method, item_bytes=item_bytes)
        if chunks is None:
            assert method == "lz4"  # finds nothing where elements are taken apart
            assert item_bytes < 4
            continue
        memory = bytearray(size)
        decompress(memoryview(b"".join(chunks)), memoryview(memory), where="a")
        assert memory == PLAIN[:size]


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_what_the_library_refuses_is_stored_as_it_is(monkeypatch, caplog, error):
    """A save must not fail for what it can do without."""
    from milepost.frames import codec

    class Refusing:
        """Compresses nothing."""

        def compress2(self, data, **how):
            raise error("Could not compress the data")

    monkeypatch.setattr(codec, "load_codec", lambda what: Refusing())
    store = MemoryStore()
    assert write(store).frames is None
    assert store.get("a") == PLAIN
    assert "Could not compress" in caplog.text


def test_what_the_library_cannot_read_again_is_stored_as_it_is(monkeypatch, caplog):
    """It would be found out when the checkpoint is needed."""
    from milepost.frames import codec

    right = codec.load_codec("a test")

    class Erring:
        """Alters a byte on the way back."""

        def compress2(self, data, **how):
            return right.compress2(data, **how)

        def decompress2(self, chunk, into, **how):
            right.decompress2(chunk, into, **how)
            into[7] ^= 1

    monkeypatch.setattr(codec, "load_codec", lambda what: Erring())
    store = MemoryStore()
    entry = write(store)
    assert entry.frames is None
    assert store.get("a") == PLAIN
    assert "as it is" in caplog.text


def test_a_frame_of_the_wrong_size_is_refused():
    """A header that promises more than the block must not be believed."""
    for size in (CHUNK_BYTES, CHUNK_BYTES + 70_000, CHUNK_BYTES + 70_002, 3 * CHUNK_BYTES):
        with pytest.raises(FormatError):
            decompress(memoryview(FRAME), memoryview(bytearray(size)), where="a")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("codec", "gzip"),
        ("codec", None),
        ("size", 0),
        ("size", -1),
        ("size", 2**61),
        ("size", 2 * BLOCK_BYTES),
        ("size", 8.0),
        ("size", True),
        ("lengths", None),
        ("lengths", [1, 2]),
        ("lengths", [1, 2, "3"]),
        ("lengths", [BLOCK_BYTES + 1, 1, 1]),
        ("lengths", [0, 1, 1]),
        ("lengths", [True, True, True]),
        ("crc32c", "00"),
        ("crc32c", None),
        ("crc32c", "G" * 24),
        ("frame_crc32c", "0" * 32),
        ("frame_crc32c", 7),
    ],
    ids=str,
)
def test_a_table_of_frames_that_does_not_fit_is_refused(field, value):
    """Each of these would lead a reader out of the file, or out of its memory."""
    entry = write(MemoryStore())
    good = entry.to_json()
    assert FileEntry.from_json(good, where="m") == entry
    bad = copy.deepcopy(good)
    bad["frames"][field] = value
    with pytest.raises(FormatError):
        FileEntry.from_json(bad, where="m")
    del bad["frames"][field]
    with pytest.raises(FormatError):
        FileEntry.from_json(bad, where="m")
    for frames in (None, 7, [], "x"):
        if frames is not None:
            with pytest.raises(FormatError):
                FileEntry.from_json({**good, "frames": frames}, where="m")


def test_decompressed_bytes_are_compared_as_well(tmp_path):
    """The checksum of a frame says that it came whole, not that it is the right one."""
    from milepost.engine.read import read_file

    store = LocalStore(tmp_path)
    entry = write(store)
    frames = entry.frames
    other = Frames(
        frames.size_bytes, (crc32c(b"no"), *frames.crcs[1:]), frames.lengths, frames.frame_crcs
    )
    assert read_file(store, "a", entry) == PLAIN
    with pytest.raises(DamagedError, match="Block 0"):
        read_file(store, "a", FileEntry("a", entry.size_bytes, entry.crcs, frames=other))


def test_without_the_library_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    """Neither a reader nor a writer may go on without it, or say that something is damaged."""
    import sys

    from milepost.frames import codec
    from milepost.visible import check_compression

    store = LocalStore(tmp_path)
    entry = write(store)
    codec._library.cache_clear()
    monkeypatch.setitem(sys.modules, "blosc2", None)
    try:
        for ask in (
            lambda: read(store, entry),
            lambda: check_compression("zstd", "milepost"),
            lambda: check_compression("lz4", "milepost"),
        ):
            with pytest.raises(errors.UsageError, match=r"milepost\[compression\]"):
                ask()
    finally:
        codec._library.cache_clear()


@pytest.mark.parametrize("error", [OSError, ImportError, ValueError, AttributeError])
def test_with_a_library_that_does_not_load_the_error_says_so(tmp_path, monkeypatch, error):
    """What does not fit the machine raises what it likes, and is no damage of a checkpoint."""
    from milepost.frames import codec
    from milepost.visible import check_compression

    def fail():
        raise error("libblosc2.so.7")

    store = LocalStore(tmp_path)
    entry = write(store)
    monkeypatch.setattr(codec, "_library", fail)
    assert not codec.is_loadable()
    for ask in (lambda: read(store, entry), lambda: check_compression("zstd", "milepost")):
        with pytest.raises(errors.UsageError, match=r"does not load: libblosc2\.so\.7"):
            ask()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["codec", "size", "crc32c", "lengths", "frame_crc32c"]), JSON),
    st.booleans(),
)
def test_whatever_a_table_of_frames_says_it_fits_or_is_refused(fields, is_base):
    """A manifest may come from a stranger."""
    base = {
        "codec": "blosc2",
        "size": BLOCK_BYTES + 5,
        "crc32c": "0" * 16,
        "lengths": [4_097, 5],
        "frame_crc32c": "0" * 16,
    }
    try:
        frames = Frames.from_json(
            {**(base if is_base else {}), **fields}, stored_bytes=8_197, where="m", path="a"
        )
    except FormatError:
        return
    assert frames.stored_bytes == 8_197
    assert len(frames.lengths) == block_count(frames.size_bytes) == len(frames.starts())
