"""Settings that hold for every test: how hard Hypothesis tries, and what the header tells."""

from __future__ import annotations

import os
import platform
from importlib import metadata

from hypothesis import HealthCheck, settings

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


def pytest_report_header() -> str:
    """Name the versions that a failure may depend on."""
    names = ("torch", "numpy", "obstore", "crc32c", "safetensors")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in names)
    return f"kernel {platform.release()}, {os.cpu_count()} CPUs; {versions}"
