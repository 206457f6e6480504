"""Records with right seals and odd numbers: every reader ends well, or in a typed error.

JSON has whole numbers of any length, and our trees have NaN. What computes with a number of a
record must never be the first to find out.
"""

from __future__ import annotations

import copy
import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import milepost as mp
from milepost.checkpoint import open_checkpoint
from milepost.cli.app import app
from milepost.format import canonical
from milepost.runs.pins import pin
from milepost.runs.prune import decide
from milepost.stores import LocalStore

NAN = {"$": "float", "bits": "7ff8000000000000"}
INFINITY = {"$": "float", "bits": "7ff0000000000000"}
ODD = [
    *(10**400, -(10**400), 2**63 + 1, -1, 0),
    *(1e308, -1e308, 5e-324, 253402300800.0, NAN, INFINITY),
    *("x", None, True, [1], {"a": [1]}),
]
RECORDS = (
    "a/manifest.json",
    "b/manifest.json",
    "run.json",
    "pins/a.json",
    "sessions/00000001.json",
    "sessions/00000001.from.json",
    "a/metadata.json",
)
KNOWN = {
    "time": {"epoch": 1, "batch": 2, "sample": 3, "token": 4, "wall_s": 0.5},
    "metrics": {"loss": 0.5, "n": 3},
    "stats": {
        "written_bytes": 10,
        "write_s": 1.0,
        "linked_bytes": 1,
        "late_bytes": 5,
        "compressed_from_bytes": 4,
        "compressed_to_bytes": 2,
        "blocking_s": 0.1,
    },
    "interval": {"stall_s": 0.1, "slowdown_s": 0.1, "write_s": 0.1, "batch_s": 0.1},
}


def tracked():
    return {"model": torch.nn.Linear(2, 2), "x": mp.Value(lambda: 1, lambda _: None)}


def numbers_in(value, path=()):
    """Every place of a number in a record, and each whole record of counters."""
    if isinstance(value, dict):
        if path and path[0] in (*KNOWN, "metadata") and len(path) == 1:
            yield path
        for key, member in value.items():
            yield from numbers_in(member, (*path, key))
    elif isinstance(value, list):
        for at, member in enumerate(value):
            yield from numbers_in(member, (*path, at))
    elif type(value) in (int, float):
        yield path


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of two checkpoints, and its records."""
    folder = tmp_path_factory.mktemp("odd") / "run"
    with mp.Checkpointer(folder, **tracked()) as run:
        run.save("a", metrics={"loss": 1.0}, wait=True)
        run.save("b", metrics={"loss": 2.0}, wait=True)
    pin(LocalStore(folder), "a")
    mp.open_run(folder).get("a").set_metadata({"n": 1})
    records = {}
    for name in RECORDS:
        fields = json.loads((folder / name).read_bytes())
        fields.pop("digest")
        if name.endswith("manifest.json"):
            fields.update(copy.deepcopy(KNOWN))
        records[name] = fields
    return folder, records


def seal(path, fields):
    path.unlink()
    path.write_bytes(canonical.dump_record(fields))


def try_all(folder):
    """Call whatever reads records. Anything but a typed error is a failure."""
    policies = [
        *(mp.KeepLast(1), mp.KeepBest(1, "loss", "min"), mp.KeepEvery("1ba")),
        *(mp.KeepEvery("6h"), mp.KeepWithin("1h")),
    ]

    def resume():
        with mp.Checkpointer(folder, every="auto", keep=policies, **tracked()) as run:
            run.step()
            run.save("c", wait=True)

    calls = [
        lambda: mp.open_run(folder).checkpoints(all=True),
        lambda: mp.open_run(folder).best("loss", "max"),
        lambda: decide(mp.open_run(folder).view, policies),
    ]
    for name in ("a", "b"):
        calls += [
            lambda name=name: mp.open_run(folder).get(name).load(),
            lambda name=name: mp.open_run(folder).get(name).verify("full"),
            lambda name=name: mp.open_run(folder).get(name).update_metadata({"q": 1}),
        ]
    for call in [*calls, resume]:
        try:
            call()
        except mp.CheckpointError:
            continue
    for verb in (["ls", "--all"], ["show"], ["prune", "--keep-last", "1", "--why", "--dry-run"]):
        result = CliRunner().invoke(app, [verb[0], str(folder), *verb[1:]])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
    result = CliRunner().invoke(app, ["show", f"{folder}/a"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_an_odd_number_in_any_record_ends_well_or_in_a_typed_error(whole, tmp_path_factory, data):
    """A checkpoint of a stranger must not end a training with an error that nobody expects."""
    folder, records = whole
    name = data.draw(st.sampled_from(RECORDS))
    fields = copy.deepcopy(records[name])
    places = sorted(numbers_in(fields), key=str)
    path = data.draw(st.sampled_from(places))
    inside = fields
    for part in path[:-1]:
        inside = inside[part]
    inside[path[-1]] = data.draw(st.sampled_from(ODD))
    made = Path(tmp_path_factory.mktemp("made")) / "run"
    shutil.copytree(folder, made, symlinks=True)
    seal(made / name, fields)
    logging.disable(logging.CRITICAL)
    try:
        try_all(made)
    finally:
        logging.disable(logging.NOTSET)
        shutil.rmtree(made)


@pytest.mark.parametrize(
    ("record", "field", "value"),
    [
        ("b/manifest.json", "time", {"epoch": NAN, "batch": NAN}),
        ("b/manifest.json", "time", {"epoch": 10**400}),
        ("b/manifest.json", "metrics", {"loss": 10**400}),
        ("b/manifest.json", "interval", {"stall_s": 10**400}),
        ("b/manifest.json", "interval", {"stall_s": 1e308, "slowdown_s": 1e308}),
        ("b/manifest.json", "stats", {"written_bytes": 10**400, "write_s": 10**400}),
        ("a/manifest.json", "stats", {"late_bytes": "x"}),
        ("a/manifest.json", "created_s", 1e300),
        ("a/manifest.json", "world_size", 10**30),
        ("a/metadata.json", "metadata", "abc"),
        ("sessions/00000001.json", "started_s", 10**400),
        ("sessions/00000001.json", "started_s", 1e300),
        ("run.json", "created_s", 10**400),
    ],
)
def test_a_field_that_once_ended_in_a_raw_error(whole, tmp_path, record, field, value):
    """Each of these reached something that computes with it."""
    folder, records = whole
    made = tmp_path / "run"
    shutil.copytree(folder, made, symlinks=True)
    seal(made / record, {**records[record], field: value})
    try_all(made)


def test_a_number_out_of_bounds_is_told_as_a_malformed_record(whole, tmp_path):
    """The reason names the field; the other checkpoints of the run stay readable."""
    folder, records = whole
    made = tmp_path / "run"
    shutil.copytree(folder, made, symlinks=True)
    seal(made / "b/manifest.json", {**records["b/manifest.json"], "metrics": {"loss": 10**400}})
    with pytest.raises(mp.FormatError, match="metrics"):
        open_checkpoint(made / "b").manifest  # noqa: B018
    assert mp.open_run(made).best("loss").name == "a"
