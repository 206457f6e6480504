"""Saves to and loads from a bucket, beside what clients of buckets do with the same bytes.

The clients move one object between the bucket and memory, and know nothing of commits. Milepost
saves a state that lies in live tensors, with its records, checks every byte of a load, and ends in
live tensors. All of them ask the same server on the same machine, whose work counts too.
"""

from __future__ import annotations

import importlib.util
import io
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import obstore
from claims import State, milepost_run, num_bytes
from figures import Figures
from gateway import BUCKET, Gateway, gateway
from obstore.store import from_url

from milepost import Checkpointer, open_run
from milepost.format.digest import BLOCK_BYTES
from milepost.stores.cloud import CloudStore

__all__ = ["DOWNLOADS", "UPLOADS", "missing", "save_and_load"]

STATE_BYTES = 2**30
_NUM_REQUESTS = 8
_SETTLE_S, _DELETED_S = 0.5, 1.0
"""The server goes on working for a moment when it has answered, and for longer when it was told to
delete, on the cores of who copies next."""

_NUM_LAYERS = 16
"""134 MB of weights: several requests for blocks that lie side by side."""

_OURS = "milepost"
_OBJECT = "peer"
Transfer = Callable[[Gateway, memoryview], Callable[[], Any]]


@dataclass(slots=True)
class _Round:
    """Takes the figures of a round: seconds, and processor time of both sides.

    Attributes:
        bucket: The server.
        row: The figures.
    """

    bucket: Gateway
    row: dict[str, float] = field(default_factory=dict)

    def timed(self, name: str, call: Callable[[], Any]) -> None:
        """Call, and take what it cost; what the server does for it afterwards counts for it too."""
        served_s, ours_s, start = self.bucket.cpu_s, time.process_time(), time.perf_counter()
        call()
        self.row[name] = time.perf_counter() - start
        self.row[f"{name} client"] = time.process_time() - ours_s
        time.sleep(_SETTLE_S)
        self.row[f"{name} server"] = self.bucket.cpu_s - served_s


def save_and_load(folder: Path, *, rounds: int) -> tuple[Figures, int]:
    """Measure saves until they are committed, and loads, of one state; clients beside."""
    state = _state(STATE_BYTES)
    size = num_bytes(state)
    memory = memoryview(bytearray(size))
    memory[:] = b"".join(bytes(tensor.numpy().data.cast("B")) for tensor in state.values())
    figures = Figures()
    with gateway(folder) as bucket:
        client = bucket.boto3()
        uploads = {name: make(bucket, memory) for name, make in UPLOADS.items() if _has(name)}
        downloads = {name: make(bucket, memory) for name, make in DOWNLOADS.items() if _has(name)}
        store = CloudStore(f"s3://{BUCKET}/run", config=bucket.options)
        with (
            milepost_run(store, state) as run,
            milepost_run(folder / "run", state) as local,
        ):
            local.save("warm", wait=True)
            for index in range(rounds + 1):
                taken, saved = _Round(bucket), f"round{index}"
                for name in _turned([*uploads, _OURS], index):
                    if name == _OURS:
                        taken.timed(f"{name} up", partial(_save, run, saved, taken.row))
                        continue
                    taken.timed(f"{name} up", uploads[name])
                    if name != "obstore":  # which is loaded below
                        client.delete_object(Bucket=BUCKET, Key=f"{_OBJECT}-{name}")
                        time.sleep(_DELETED_S)
                start = time.perf_counter()
                beside = local.save(saved)
                taken.row["local blocking"] = time.perf_counter() - start
                beside.wait()
                downloads[_OURS] = partial(run.restore, saved, items=["model"])
                for name in ("obstore", _OURS):
                    downloads[name]()  # the first look at new bytes costs the server twice as much
                for name in _turned(list(downloads), index):
                    taken.timed(f"{name} down", downloads[name])
                for entry in store.list(saved):
                    client.delete_object(Bucket=BUCKET, Key=f"run/{entry.key}")
                client.delete_object(Bucket=BUCKET, Key=f"{_OBJECT}-obstore")
                time.sleep(_DELETED_S)
                if index:  # the first round warms every variant
                    figures.add_round(taken.row)
        figures.add("weights bytes", _share_of_weights(bucket))
    return figures, size


def _save(run: Checkpointer, name: str, row: dict[str, float]) -> None:
    start = time.perf_counter()
    pending = run.save(name)
    row[f"{_OURS} blocking"] = time.perf_counter() - start
    pending.wait()


def _turned(names: list[str], count: int) -> list[str]:
    """Return names in turn, so that nobody always follows on the same one."""
    start = count % len(names)
    return names[start:] + names[:start]


class _Read:
    """A store that counts what is read of parts."""

    def __init__(self, store: CloudStore) -> None:
        self._store = store
        self.num_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def open_reader(self, key: str) -> Any:
        """Open a key, and count its ranges."""
        reader: Any = self._store.open_reader(key)
        for way in ("stream", "lend"):
            setattr(reader, way, self._counted(getattr(reader, way)))
        return reader

    def _counted(self, ask: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
        def counted(offset: int, length: int) -> Any:
            self.num_bytes += length
            return ask(offset, length)

        return counted


def _share_of_weights(bucket: Gateway) -> float:
    """Return what a load of the weights alone reads of a checkpoint with both moments of AdamW."""
    import torch

    model, other = (
        torch.nn.Sequential(*(torch.nn.Linear(1448, 1448) for _ in range(_NUM_LAYERS)))
        for _ in range(2)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1448)).sum().backward()
    optimizer.step()
    store: Any = _Read(CloudStore(f"s3://{BUCKET}/weights", config=bucket.options))
    with Checkpointer(store, model=model, optimizer=optimizer, handle_signals=False) as run:
        run.save("all", wait=True)
    saved = open_run(store).get("all")
    store.num_bytes = 0
    saved.load_weights(other)
    if not all(map(torch.equal, model.state_dict().values(), other.state_dict().values())):
        raise RuntimeError("The weights that were loaded are not those that were saved.")
    return float(store.num_bytes / saved.manifest.size_bytes)


def missing() -> list[str]:
    """Return the clients that are measured when they are installed, and are not."""
    return [name for name in UPLOADS if not _has(name)]


def _state(num_bytes: int) -> State:
    import torch

    generator = torch.Generator().manual_seed(0)
    count = max(1, num_bytes // (32 * 2**20))
    return {f"w{n}": torch.randn(2896, 2896, generator=generator) for n in range(count)}


def _has(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _obstore_up(bucket: Gateway, memory: memoryview) -> Callable[[], Any]:
    store = from_url(
        f"s3://{BUCKET}", client_options={"allow_http": True, "timeout": "120s"}, **bucket.options
    )
    return lambda: obstore.put(
        store,
        f"{_OBJECT}-obstore",
        memory,
        use_multipart=True,
        chunk_size=BLOCK_BYTES,
        max_concurrency=_NUM_REQUESTS,
    )


def _obstore_down(bucket: Gateway, memory: memoryview) -> Callable[[], Any]:
    store = from_url(
        f"s3://{BUCKET}", client_options={"allow_http": True, "timeout": "120s"}, **bucket.options
    )

    def load() -> None:
        def piece(start: int) -> None:
            stop = min(start + BLOCK_BYTES, len(memory))
            obstore.get_range(store, f"{_OBJECT}-obstore", start=start, end=stop)

        with ThreadPoolExecutor(_NUM_REQUESTS) as pool:
            list(pool.map(piece, range(0, len(memory), BLOCK_BYTES)))

    return load


def _boto3_up(bucket: Gateway, memory: memoryview) -> Callable[[], Any]:
    client, config = bucket.boto3(), _boto3_config()
    data = io.BytesIO(memory)

    def save() -> None:
        data.seek(0)
        client.upload_fileobj(data, BUCKET, f"{_OBJECT}-boto3", Config=config)

    return save


def _boto3_down(bucket: Gateway, memory: memoryview) -> Callable[[], Any]:
    del memory
    client, config = bucket.boto3(), _boto3_config()
    return lambda: client.download_fileobj(
        BUCKET, f"{_OBJECT}-obstore", io.BytesIO(), Config=config
    )


def _boto3_config() -> Any:
    from boto3.s3.transfer import TransferConfig

    return TransferConfig(multipart_chunksize=BLOCK_BYTES, max_concurrency=_NUM_REQUESTS)


def _libcloud_up(bucket: Gateway, memory: memoryview) -> Callable[[], Any]:
    container, data = _libcloud(bucket), bytes(memory)
    return lambda: container.upload_object_via_stream(iter([data]), f"{_OBJECT}-libcloud")


def _libcloud_down(bucket: Gateway, memory: memoryview) -> Callable[[], Any]:
    del memory
    container = _libcloud(bucket)

    def load() -> None:
        found = container.get_object(f"{_OBJECT}-obstore")
        b"".join(found.as_stream(chunk_size=BLOCK_BYTES))

    return load


def _libcloud(bucket: Gateway) -> Any:
    from libcloud.storage.providers import get_driver

    driver = get_driver("minio")(
        bucket.key, bucket.secret, host="127.0.0.1", port=bucket.port, secure=False
    )
    return driver.get_container(BUCKET)


def _pyarrow_up(bucket: Gateway, memory: memoryview) -> Callable[[], Any]:
    files = _pyarrow(bucket)

    def save() -> None:
        with files.open_output_stream(f"{BUCKET}/{_OBJECT}-pyarrow") as stream:
            stream.write(memory)

    return save


def _pyarrow_down(bucket: Gateway, memory: memoryview) -> Callable[[], Any]:
    del memory
    files = _pyarrow(bucket)

    def load() -> None:
        with files.open_input_file(f"{BUCKET}/{_OBJECT}-obstore") as file:
            file.read()

    return load


def _pyarrow(bucket: Gateway) -> Any:
    from pyarrow.fs import S3FileSystem

    # Its newer checksums are sent in a way that this server does not take.
    os.environ.setdefault("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    return S3FileSystem(
        access_key=bucket.key,
        secret_key=bucket.secret,
        endpoint_override=f"127.0.0.1:{bucket.port}",
        scheme="http",
        region="us-east-1",
    )


UPLOADS: Mapping[str, Transfer] = {
    "obstore": _obstore_up,
    "boto3": _boto3_up,
    "libcloud": _libcloud_up,
    "pyarrow": _pyarrow_up,
}
"""One object of the state's bytes, from memory; obstore and boto3 with eight requests at once."""

DOWNLOADS: Mapping[str, Transfer] = {
    "obstore": _obstore_down,
    "boto3": _boto3_down,
    "libcloud": _libcloud_down,
    "pyarrow": _pyarrow_down,
}
"""The same object, into memory, unchecked."""
