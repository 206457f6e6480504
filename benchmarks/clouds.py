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
from pathlib import Path
from typing import Any

import obstore
from claims import State, milepost_run, num_bytes
from figures import Figures
from gateway import BUCKET, Gateway, gateway
from obstore.store import from_url

from milepost.format.digest import BLOCK_BYTES
from milepost.stores.cloud import CloudStore

__all__ = ["DOWNLOADS", "UPLOADS", "missing", "save_and_load"]

STATE_BYTES = 2**30
_NUM_REQUESTS = 8
_SETTLE_S = 0.5
"""The server goes on working for a moment when it has answered, on the cores of who copies next."""

_OBJECT = "peer"
Transfer = Callable[[Gateway, memoryview], Callable[[], Any]]


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
                row: dict[str, float] = {}
                for name, upload in uploads.items():
                    row[f"{name} up"] = _timed(upload)
                    if name != "obstore":  # which is loaded below
                        client.delete_object(Bucket=BUCKET, Key=f"{_OBJECT}-{name}")
                time.sleep(_SETTLE_S)
                start = time.perf_counter()
                pending = run.save(f"round{index}")
                row["milepost blocking"] = time.perf_counter() - start
                pending.wait()
                row["milepost up"] = time.perf_counter() - start
                time.sleep(_SETTLE_S)
                start = time.perf_counter()
                beside = local.save(f"round{index}")
                row["local blocking"] = time.perf_counter() - start
                beside.wait()
                for name, download in downloads.items():
                    row[f"{name} down"] = _timed(download)
                start = time.perf_counter()
                run.restore(pending.name, items=["model"])
                row["milepost down"] = time.perf_counter() - start
                for entry in store.list(pending.name):
                    client.delete_object(Bucket=BUCKET, Key=f"run/{entry.key}")
                if index:  # the first round warms every variant
                    figures.add_round(row)
    return figures, size


def missing() -> list[str]:
    """Return the clients that are measured when they are installed, and are not."""
    return [name for name in UPLOADS if not _has(name)]


def _state(num_bytes: int) -> State:
    import torch

    generator = torch.Generator().manual_seed(0)
    count = max(1, num_bytes // (32 * 2**20))
    return {f"w{n}": torch.randn(2896, 2896, generator=generator) for n in range(count)}


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


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
    return lambda: client.upload_fileobj(
        io.BytesIO(memory), BUCKET, f"{_OBJECT}-boto3", Config=config
    )


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
    container = _libcloud(bucket)
    return lambda: container.upload_object_via_stream(iter([bytes(memory)]), f"{_OBJECT}-libcloud")


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
