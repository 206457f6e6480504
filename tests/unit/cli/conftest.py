"""Small runs, written without torch, and the program to look at them with."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from milepost import runs
from milepost.cli.app import app
from milepost.format.digest import block_crcs
from milepost.format.header import encode_header
from milepost.format.manifest import FileEntry, Manifest
from milepost.stores.local import LocalStore

CREATED_S = 1_700_000_000.0


@dataclass
class Program:
    """Runs the program in this process."""

    def __call__(self, *arguments: object, code: int = 0, stdin: str | None = None) -> Any:
        result = CliRunner().invoke(app, [str(one) for one in arguments], input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, (result.exit_code, result.stdout, result.stderr)
        return result

    def json(self, *arguments: object, code: int = 0) -> Any:
        def refuse(name: str) -> None:
            raise AssertionError(f"{name} is not JSON")

        text = self(*arguments, "--json", code=code).stdout
        return json.loads(text, parse_constant=refuse)


@pytest.fixture
def milepost() -> Program:
    return Program()


def tensor_file(tensors: Mapping[str, tuple[float, ...]]) -> bytes:
    """Return a part of vectors of float32."""
    rows = [(name, "F32", (len(values),), 4 * len(values)) for name, values in tensors.items()]
    header, _ = encode_header(rows)
    return header + b"".join(struct.pack(f"<{len(v)}f", *v) for v in tensors.values())


class RunMaker:
    """Writes a run step by step through the records, as a training job would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = LocalStore(folder)
        self.run = runs.ensure_run(self.store, clock=lambda: CREATED_S)
        self.begin(None)

    def begin(self, origin: runs.Origin | None) -> None:
        session = runs.open_session(self.store, self.run)
        self.session = runs.record_origin(self.store, session, origin)
        self.attempt = 0

    def claim(self, name: str) -> runs.Claim:
        self.attempt += 1
        return runs.claim(self.store, self.session, name, self.attempt)

    def save(
        self,
        name: str,
        *,
        weights: Mapping[str, tuple[float, ...]] | None = None,
        values: Mapping[str, Any] | None = None,
        linked_from: str | None = None,
        **fields: Any,
    ) -> Manifest:
        """Commit a checkpoint of one model with vectors of float32, and a dict of numbers."""
        weights = weights or {"a.weight": (1.0, 2.0), "b": (3.0,)}
        claim = self.claim(name)
        tags = {key: {"$": "tensor", "key": key} for key in weights}
        items = {
            "model": {"tree": tags, "files": ["model.safetensors"]},
            "timer": {"tree": dict(values or {"epoch": self.attempt}), "files": []},
        }
        index = json.dumps({"format": 1, "items": items}).encode()
        files = {"model.safetensors": tensor_file(weights), "index.json": index}
        entries = []
        for path, data in files.items():
            self.store.put_new(f"{claim.folder}/{path}", data)
            link = linked_from if path.startswith("model") else None
            entries.append(FileEntry(path, len(data), tuple(block_crcs(data)), link))
        manifest = Manifest(
            name=claim.folder,
            run_id=self.run.run_id,
            session=self.session.number,
            attempt=claim.attempt,
            write_id=claim.write_id,
            world_size=1,
            layout="milepost",
            items=("model", "timer"),
            files=tuple(entries),
            software={"milepost": "0"},
            **{
                "parent": None,
                "reason": "interval",
                "is_final": False,
                "created_s": CREATED_S + self.attempt,
                "time": {"epoch": self.attempt, "batch": 10 * self.attempt},
                "metrics": {"loss": 1.0 / self.attempt},
                **fields,
            },
        )
        runs.publish(self.store, self.session, manifest)
        return manifest


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., RunMaker]:
    def make(name: str = "run") -> RunMaker:
        return RunMaker(tmp_path / name)

    return make


@pytest.fixture
def run(make_run: Callable[..., RunMaker]) -> RunMaker:
    """Three checkpoints, ep1 to ep3; the last one ends the training."""
    maker = make_run()
    maker.save("ep1")
    maker.save("ep2")
    maker.save("ep3", is_final=True, notes=("the order of a sampler is not stored",))
    return maker
