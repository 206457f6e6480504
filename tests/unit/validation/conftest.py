"""A run with checkpoints, and validators."""

from __future__ import annotations

from pathlib import Path

import pytest

from milepost.runs import ensure_run, open_session, record_origin, scan
from milepost.stores import LocalStore
from milepost.testing import save_files
from milepost.validation.config import ValidationConfig, ValidationTaskConfig
from milepost.validation.supervisor import Validations

HERE = Path(__file__).parent


class RunWithCheckpoints:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = LocalStore(folder)
        self.run = ensure_run(self.store)
        self.session = record_origin(self.store, open_session(self.store, self.run), None)
        self.number = 0

    def save(self, name: str, **metrics: float) -> str:
        """Save a checkpoint and return its write id."""
        self.number += 1
        files = {"part": name.encode()}
        return save_files(
            self.store,
            self.session,
            name=name,
            attempt=self.number,
            files=files,
            metrics=metrics,
        ).write_id

    def found(self, name: str):
        return scan(self.store).get(name)

    def validation(self, name: str):
        return self.found(name).validation


@pytest.fixture
def run(tmp_path):
    return RunWithCheckpoints(tmp_path / "run")


@pytest.fixture
def configure():
    def configure(fn: str, *, fn_kwargs=None, timeout_s=None, **options) -> ValidationConfig:
        task = ValidationTaskConfig(fn_kwargs=fn_kwargs, timeout_s=timeout_s)
        return ValidationConfig(f"validators:{fn}", task, sys_path=(str(HERE),), **options)

    return configure


@pytest.fixture
def supervise(run, configure):
    """Make supervisors that are stopped in the end."""
    made = []

    def supervise(fn: str, *, on_verdict=lambda _: None, **options) -> Validations:
        config = configure(fn, **options)
        validations = Validations(
            run.store, run_id=run.run.run_id, config=config, on_verdict=on_verdict
        )
        made.append(validations)
        return validations

    yield supervise
    for one in made:
        one.close(timeout_s=0)
