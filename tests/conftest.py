"""For every test: how hard Hypothesis tries, what the header tells, servers to save to."""

from __future__ import annotations

import os
import platform
import signal
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from . import servers
from .places import Place, apply_environment, place_at

# No deadline: other programs share the machine, and a slow example is not a wrong one.
settings.register_profile(
    "quick",
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.register_profile("campaign", parent=settings.get_profile("quick"), max_examples=1_000)
settings.load_profile("campaign" if os.environ.get("MILEPOST_CAMPAIGN") else "quick")

# A shell has what it starts in the background ignore interrupts, and that is inherited for ever:
# what tests start and interrupt would go on.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# torch asks the name server for the name of each address that it connects to, that of this machine
# included. One that loses a question of many holds up a rank for five seconds unless told so.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def pytest_report_header() -> str:
    """Name the versions that a failure may depend on."""
    names = ("torch", "numpy", "obstore", "crc32c", "safetensors")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in names)
    return f"kernel {platform.release()}, {os.cpu_count()} CPUs; {versions}"


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """A bucket that refuses to create what is there, in the memory of a process."""
    with servers.moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="session")
def juicefs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """A bucket of a real server that replaces what is there, whatever it is asked."""
    with servers.juicefs(tmp_path_factory.mktemp("juicefs")) as server:
        yield server


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    """A container of Azure's emulator, which is installed once and kept beside pytest's folders."""
    folder = tmp_path_factory.mktemp("azurite")
    with servers.azurite(folder, tmp_path_factory.getbasetemp().parent) as server:
        yield server


@pytest.fixture(scope="session")
def gcs() -> Iterator[servers.Server]:
    """A bucket by the protocol of Google Cloud Storage."""
    with servers.gcs() as server:
        yield server


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Where a test has its runs: ``disk``, or the name of a server, as the test was told."""
    place = place_at(request.param, request, tmp_path)
    apply_environment(place, monkeypatch)
    return place
