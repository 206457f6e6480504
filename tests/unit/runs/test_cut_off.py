"""Which uploads are ended: the table of ``runs/cut_off.py``, row by row.

The place is one in memory that is told what its service shows.
"""

from __future__ import annotations

import logging
import math
import time

import pytest
import torch

import milepost as mp
from milepost.errors import AccessError, StorageError
from milepost.format.canonical import dump_record
from milepost.runs import Identity, adopt, claim, end_cut_off, find_cut_off, scan, sweep
from milepost.stores import MemoryStore
from milepost.stores.base import BegunUpload, BegunUploads

DAY_S = 24 * 3600.0
LATER = Identity("host", 9, "boot-9", "9@ns", "machine")
"""The machine of the sessions, started anew: it can tell that they have ended."""

STRANGER = Identity("elsewhere", 3, "boot-3", "3@ns", "another machine")


class Showing(MemoryStore):
    """A place that shows the uploads it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[BegunUpload] = []
        self.now_s: float | None = time.time()
        self.is_by_key = False
        self.asked: list[str] = []
        self.ended: list[str] = []
        self.error: Exception | None = None
        self.last_s: dict[str, float] = {}

    def why_uploads_are_unseen(self) -> str:
        return ""

    def begun_uploads(self, start: str = "") -> BegunUploads:
        self.asked.append(start)
        if self.error is not None:
            raise self.error
        found = [one for one in self.shown if one.key.startswith(start)]
        if self.is_by_key:
            found = [one for one in found if one.key == start]
        return BegunUploads(tuple(found), now_s=self.now_s, is_whole=not self.is_by_key)

    def upload_written_s(self, upload: BegunUpload) -> float:
        return self.last_s.get(upload.key, upload.begun_s)

    def end_upload(self, upload: BegunUpload) -> None:
        if upload.key == "ep9/stuck.safetensors":
            raise StorageError("It will not.", path=upload.key)
        self.ended.append(upload.key)

    def begin(self, key: str, *, age_s: float = 0.0) -> None:
        self.shown.append(BegunUpload(key, f"id-{len(self.shown)}", time.time() - age_s))


@pytest.fixture
def place() -> Showing:
    return Showing()


def dead(place: Showing, identity: Identity = LATER, **options) -> list[str]:
    found = find_cut_off(place, scan(place), identity=identity, **options)
    assert len(found.dead) + len(found.others) == len(place.shown)
    return sorted(one.key for one in found.dead)


def at_age(place: Showing, age_s: float) -> None:
    """Let the clock of the service go on."""
    place.now_s = time.time() + age_s + 60


def test_an_upload_that_ends_while_it_is_looked_at_stops_nothing(place, begin):
    """Another may sweep at the same time; what is left is still ended."""
    begin(place, pid=1)
    keys = ["ep1/model.safetensors", "ep2/model.safetensors"]
    for key in keys:
        place.begin(key)
    place.last_s[keys[0]] = math.inf
    at_age(place, DAY_S)
    assert dead(place) == keys[1:]


def test_an_error_of_any_kind_in_a_sweep_keeps_no_training_from_starting(place, caplog):
    """It is housekeeping, and asks more of the place, and of other libraries, than a save does."""
    model = torch.nn.Linear(1, 1)
    with mp.Checkpointer(place, model=model) as run:
        run.save("one", wait=True)
    place.error = KeyError("Initiated")
    with caplog.at_level(logging.WARNING, logger="milepost"):
        with mp.Checkpointer(place, model=model) as run:
            assert run.resumed_from == "one"
    assert "could not be removed" in caplog.text
    assert place.asked == [""]


def test_a_claim_tells_whose_an_upload_is(place, begin):
    """Any file of the attempt, whatever its name; and only once its session has certainly ended."""
    claim(place, begin(place, pid=1), "ep1", 1)
    for key in ("ep1/model.safetensors", "ep1/sub/weights.bin", "nan/ep1/model.safetensors"):
        place.begin(key)
    assert dead(place) == ["ep1/model.safetensors", "ep1/sub/weights.bin"]
    assert dead(place, STRANGER) == []
    assert dead(place, Identity("host", 1, "boot-1", "1@ns", "machine")) != dead(place, STRANGER)


def test_the_claim_of_a_session_that_may_live_protects_its_uploads(place, begin):
    """Though another session has ended, and a third one asks."""
    claim(place, begin(place, pid=1), "ep1", 1)
    second = begin(place, pid=2)
    claim(place, second, "ep2", 1)
    third = begin(place, pid=3)
    claim(place, third, "ep3", 1)
    for name in ("ep1", "ep2", "ep3"):
        place.begin(f"{name}/model.safetensors")
    assert "ep3/model.safetensors" not in dead(place, LATER, session=third)
    assert dead(place, LATER, session=third, own_attempts=("ep2",)) == ["ep1/model.safetensors"]
    assert dead(place, STRANGER, session=third) == []


def test_a_claim_that_cannot_be_read_may_be_any_sessions(place, begin):
    """All others must have ended."""
    begin(place, pid=1)
    place.put("ep1/attempt.json", b"torn")
    place.begin("ep1/model.safetensors")
    assert dead(place) == ["ep1/model.safetensors"]
    assert dead(place, STRANGER) == []
    place.put("ep1/attempt.json", dump_record({"format": 1, "session": ["odd"]}))
    assert dead(place) == ["ep1/model.safetensors"]


def test_the_claims_of_copies_and_of_files_of_others_protect(place, begin):
    """A copy is no session; what others write is not ours, however old."""
    session = begin(place, pid=1)
    adopt(place, session, "theirs", 1)
    place.put("copy/attempt.json", dump_record({"format": 1, "session": 0, "is_copy": True}))
    place.begin("theirs/model.safetensors")
    place.begin("copy/model.safetensors")
    assert dead(place) == []
    at_age(place, DAY_S)
    assert dead(place) == ["copy/model.safetensors"]


def test_a_commit_needs_no_upload_to_its_files_any_more(place, begin, save):
    """Only those that it lists are ours; and somebody may be putting back what came to harm."""
    save(place, begin(place, pid=1), "ep1", 1, files={"model.safetensors": b"1"})
    place.begin("ep1/model.safetensors")
    place.begin("ep1/their.safetensors")
    assert dead(place) == []
    at_age(place, DAY_S)
    assert dead(place) == dead(place, STRANGER) == ["ep1/model.safetensors"]


def test_where_nobody_can_judge_a_day_must_pass_without_a_part(place, begin):
    """By the clock of the service; an upload that is slow goes on."""
    begin(place, pid=1)
    place.begin("gone/model.safetensors")
    place.begin("gone/notes.txt")
    place.begin("slow/model.safetensors")
    assert dead(place) == []
    at_age(place, DAY_S)
    place.last_s["slow/model.safetensors"] = place.now_s - DAY_S / 2
    assert dead(place) == ["gone/model.safetensors"]
    place.now_s = None
    assert dead(place) == []


def test_a_time_that_cannot_be_is_not_believed(place, begin):
    """A service that says of every upload that it is years old must not end those of today."""
    begin(place, pid=1)
    place.begin("gone/model.safetensors", age_s=10 * 365 * DAY_S)
    at_age(place, DAY_S)
    assert dead(place) == []


def test_what_is_not_ours_stays_however_old(place, begin):
    """Other runs below, records, folders that people use, and names that no checkpoint has."""
    begin(place, pid=1)
    place.put("datasets/readme.txt", b"mine")
    for key in (
        "other/ep1/model.safetensors",
        "sessions/model.safetensors",
        "events/reports.safetensors",
        "datasets/train.safetensors",
        "model.safetensors",
        "-odd/model.safetensors",
        "nan/model.safetensors",
    ):
        place.begin(key)
    at_age(place, DAY_S)
    assert dead(place) == []


def test_a_service_that_shows_no_folders_is_asked_for_the_parts_of_dead_attempts(
    place, begin, save
):
    """By the names of the newest checkpoint's parts, or the usual ones where there is none."""
    place.is_by_key = True
    session = begin(place, pid=1)
    claim(place, session, "ep1", 1)
    place.begin("ep1/model.safetensors")
    assert dead(place) == ["ep1/model.safetensors"]
    assert place.asked[1:] == ["ep1/model.safetensors", "ep1/optimizers.safetensors"]
    save(place, session, "ep0", 2, files={"ema-r00001.safetensors": b"1", "index.json": b"{}"})
    place.asked.clear()
    place.shown.clear()
    place.begin("ep1/ema-r00001.safetensors")
    assert dead(place) == ["ep1/ema-r00001.safetensors"]
    assert place.asked == ["", "ep1/ema-r00001.safetensors"]


def test_sweeping_ends_uploads_before_it_forgets_whose_they_were(place, begin):
    """A stop between the two must leave the claim, by which the next one knows."""
    claim(place, begin(place, pid=1), "ep1", 1)
    place.begin("ep1/model.safetensors")
    claims_then: list[bool] = []
    end = place.end_upload

    def look_and_end(upload: BegunUpload) -> None:
        claims_then.append(any(one.key == "ep1/attempt.json" for one in place.list("ep1")))
        end(upload)

    place.end_upload = look_and_end
    assert sweep(place, begin(place, pid=9), identity=LATER) == ["ep1"]
    assert (place.ended, claims_then) == (["ep1/model.safetensors"], [True])


def test_sweeping_goes_on_where_uploads_cannot_be_seen_or_ended(place, begin, caplog):
    """Without the right to list them nothing is wrong; another error is told in the end."""
    first = begin(place, pid=1)
    claim(place, first, "ep1", 1)
    place.error = AccessError("No.")
    second = begin(place, pid=2)
    assert sweep(place, second, identity=LATER) == ["ep1"]
    claim(place, second, "ep9", 1)
    place.error = StorageError("Away.")
    third = begin(place, pid=3)
    with pytest.raises(StorageError, match="Away"):
        sweep(place, third, identity=LATER)
    assert list(place.list("ep9")) == []
    place.error = None
    place.begin("ep9/stuck.safetensors")
    place.begin("ep9/other.safetensors")
    assert list(end_cut_off(place, place.shown)) == ["ep9/stuck.safetensors"]
    assert place.ended == ["ep9/other.safetensors"]
