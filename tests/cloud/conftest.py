"""Object stores on this machine."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import pytest

from milepost.testing.proxy import Request

KEY, SECRET = "AKIATESTTESTTEST", "secret-that-must-not-be-seen"


def is_put(request: Request) -> bool:
    return request.method == "PUT"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        assert process.poll() is None, "the server has ended"
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError("the server did not come up")


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """A server that speaks S3, conditional creation included."""
    pytest.importorskip("moto.server")
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for_port(port, process)
        endpoint = f"http://127.0.0.1:{port}"
        request = urllib.request.Request(f"{endpoint}/runs", method="PUT")
        urllib.request.urlopen(request, timeout=30).close()
        yield endpoint
    finally:
        process.terminate()
        process.wait(30)
