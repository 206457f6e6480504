"""Reports of two workers, beside Ray Train where it is installed.

Both run the same loop: reports of metrics alone, then reports with a checkpoint of one file each,
waited for. A figure is the seconds of one report, of the slower worker. What "waited for" means
differs: Milepost's report returns when the checkpoint is committed and synced to the disk, Ray's
when it was copied to the run's folder and handed to a queue.
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from figures import Figures

import milepost as mp

_METRICS_ONLY = {"milepost": 1000, "ray.train": 10}
_WITH_FILES = {"milepost": 10, "ray.train": 5}
_FILE_BYTES = 1024 * 1024


def seconds_of_reports(folder: Path, *, rounds: int) -> tuple[Figures, int]:
    """Measure reports; see the module."""
    figures = Figures()
    variants: dict[str, Callable[[Path, dict[str, Any]], None]] = {"milepost": _with_milepost}
    if importlib.util.find_spec("ray") and importlib.util.find_spec("pandas"):
        variants["ray.train"] = _with_ray
    for number in range(rounds):
        for name, run in variants.items():
            place = folder / f"{name}-{number}"
            place.mkdir()
            config = {
                "folder": str(place),
                "metrics_only": _METRICS_ONLY[name],
                "with_files": _WITH_FILES[name],
            }
            run(place, config)
            rows = [json.loads(one.read_text()) for one in sorted(place.glob("seconds-*.json"))]
            for what in rows[0]:
                figures.add(f"{name} {what}", max(row[what] for row in rows))
    return figures, _FILE_BYTES


def with_milepost(config: dict[str, Any]) -> None:
    """Report to Milepost; what each of its workers runs."""
    _loop(config, mp.get_context().get_world_rank(), mp.report, mp.Checkpoint.from_directory)


def with_ray(config: dict[str, Any]) -> None:
    """Report to Ray Train; what each of its workers runs."""
    import ray.train

    rank = ray.train.get_context().get_world_rank()
    _loop(config, rank, ray.train.report, ray.train.Checkpoint.from_directory)


def _loop(
    config: dict[str, Any],
    rank: int,
    report: Callable[..., Any],
    from_directory: Callable[[str], Any],
) -> None:
    seconds: dict[str, float] = {}
    report({"loss": 0.0})
    started_s = time.perf_counter()
    for number in range(config["metrics_only"]):
        report({"loss": float(number)})
    seconds["metrics"] = (time.perf_counter() - started_s) / config["metrics_only"]
    data = os.urandom(_FILE_BYTES)
    started_s = time.perf_counter()
    for number in range(config["with_files"]):
        with tempfile.TemporaryDirectory(dir=config["folder"]) as folder:
            Path(folder, f"weights-{rank}").write_bytes(data)
            report({"loss": float(number)}, checkpoint=from_directory(folder))
    seconds["checkpoint"] = (time.perf_counter() - started_s) / config["with_files"]
    Path(config["folder"], f"seconds-{rank}.json").write_text(json.dumps(seconds))


def _with_milepost(place: Path, config: dict[str, Any]) -> None:
    mp.launch(
        with_milepost,
        config=config,
        scaling=mp.ScalingConfig(num_workers=2),
        run=mp.RunConfig(storage_path=str(place), name="run"),
    )


def _with_ray(place: Path, config: dict[str, Any]) -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    home = str(Path(__file__).parent)
    if not ray.is_initialized():
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": f"{home}:{os.environ.get('PYTHONPATH', '')}"}},
        )
    TorchTrainer(
        with_ray,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(place), name="run"),
    ).fit()
