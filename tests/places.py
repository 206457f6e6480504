"""Places for runs: a folder, or a prefix of a bucket, of one test alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from milepost.format.layout import ATTEMPT, LATEST, MANIFEST, METADATA, RUN
from milepost.runs import State, scan
from milepost.runs.folders import NOT_CHECKPOINTS
from milepost.stores import open_store

from .servers import Server, s3_client


@dataclass(frozen=True)
class Place:
    """Where the runs of a test are.

    Attributes:
        root: A folder or an address.
        server: What serves it, if it is a bucket.
    """

    root: str
    server: Server | None = None

    def run(self, name: str) -> str:
        """Return the place of a run."""
        return f"{self.root}/{name}"

    @property
    def environment(self) -> Mapping[str, str]:
        """Return what a process needs to know to come here."""
        return {} if self.server is None else self.server.environment


def place_at(name: str, request: pytest.FixtureRequest, folder: Path) -> Place:
    """Return a new place.

    Args:
        name: ``disk``, or a fixture of a server.
        request: Of the test that wants it.
        folder: A folder of the test alone.
    """
    if name == "disk":
        return Place(str(folder))
    server: Server = request.getfixturevalue(name)
    return Place(f"{server.url}/{folder.parent.name}/{folder.name}", server)


def strays(run: str) -> list[str]:
    """Return what lies in the place of a run without belonging to it."""
    store = open_store(run)
    view = scan(store)
    assert all(found.state is State.COMMITTED for found in view.found), view.found
    expected = {RUN, LATEST}
    for found in view.found:
        assert found.manifest is not None
        files = [entry.path for entry in found.manifest.files]
        expected |= {f"{found.name}/{file}" for file in (*files, ATTEMPT, MANIFEST, METADATA)}
    keys = [entry.key for entry in store.list()]
    return [
        key for key in keys if key not in expected and key.partition("/")[0] not in NOT_CHECKPOINTS
    ]


def open_uploads(place: Place) -> list[str]:
    """Return the objects of a bucket whose upload was begun and not ended, as its server says."""
    if place.server is None or place.server.name not in ("moto", "juicefs"):
        return []  # the other services keep none, or show none
    prefix = place.root.removeprefix(f"{place.server.url}/")
    listed = s3_client(place.server).list_multipart_uploads(Bucket="runs")
    keys = [one["Key"] for one in listed.get("Uploads", [])]
    return [key for key in keys if key.startswith(f"{prefix}/")]


def apply_environment(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    for name, value in place.environment.items():
        monkeypatch.setenv(name, value)
