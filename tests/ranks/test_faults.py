"""One rank fails in any phase of a start or a save, in any way: every rank is told, in time.

One program loads torch and goes through a table of faults. For each of them it forks two ranks,
which open a copy of the same run and save; one of the two meets the fault. Then it forks two more,
which have to go on from what was safe.

    raise   a read or write fails there, as a place does that is broken or full
    hang    the rank does not go on until every other one has ended: they cannot wait for it
    die     SIGKILL, there and then
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

import milepost as mp

OPENING = {
    "look": ("list sessions", [0]),
    "open a session": ("put_new sessions/", [0]),
    "see the session": ("head sessions/", [0, 1]),
    "read the record": ("get first/manifest.json", [1]),  # what rank 0 cannot read is damaged
    "read an index": ("open_reader first/index", [0, 1]),
    "open a part": ("open_reader first/model", [0, 1]),
    "read a part": ("read_into first/model", [0, 1]),
    "take over an object": ("load_state_dict", [0, 1]),
    "begin": ("put_new sessions/00000002.from.json", [0]),
}
SAVING = {
    "capture an object": ("state_dict", [0, 1]),
    "claim a folder": ("put_new second/attempt.json", [0]),
    "create a part": ("create_writer second/", [0, 1]),
    "write a part": ("write_at second/", [0, 1]),
    "finish a part": ("close second/", [0, 1]),
    "write the index": ("write_at second/index-r", [0, 1]),
    "look at the parts": ("head second/index-r", [0]),
    "sync": ("sync_folder second", [0]),
    "publish": ("put_new second/manifest.json", [0]),
}

PROGRAM = """
import json, os, shutil, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
import torch._dynamo  # the first step of an optimizer would load it
import milepost as mp
import milepost.checkpointer, milepost.engine.read
import milepost.ranks.team as team
import milepost.writer as writer
from milepost.errors import CheckpointError, NoSpaceError, StorageError
from milepost.launch.environment import HeldPort
from milepost.testing.faults import FaultStore

team._FOLLOWER_MARGIN_S = 1.0
base, cases, at_once = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
open_store, armed = writer.open_store, []

def meet(operation):
    # What is planned for this operation, once.
    if not armed or not operation.startswith(armed[0]["operation"]):
        return
    case = armed.pop()
    (base / f"met-{case['number']}").touch()
    if case["action"] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if case["action"] == "raise":
        raise NoSpaceError("planned") if "write" in operation else StorageError("planned")
    other = base / f"end-{case['number']}-{1 - case['victim']}"
    deadline = time.monotonic() + 60
    while not other.exists() and time.monotonic() < deadline:
        time.sleep(0.02)

writer.open_store = lambda place: FaultStore(
    open_store(place), before=lambda number, operation: meet(operation)
)

class Own:
    def state_dict(self):
        meet("state_dict")
        return {"rank": dist.get_rank()}
    def load_state_dict(self, state):
        meet("load_state_dict")
        assert state == {"rank": dist.get_rank()}

def save(folder, name, timeout_s=60.0):
    torch.manual_seed(0)
    with mp.Checkpointer(
        folder, model=torch.nn.Linear(3, 2), own=mp.PerRank(Own()),
        rank_timeout_s=timeout_s, share_timeout_s=timeout_s,
    ) as run:
        run.step()
        run.save(name, wait=True)
        return run.resumed_from

def tell(place, work):
    try:
        found = ["ok", str(work())]
    except CheckpointError as error:
        found = [type(error).__name__, str(error)]
    except Exception as error:
        found = ["not typed", repr(error)]
    place.with_suffix(".new").write_text(json.dumps(found))
    place.with_suffix(".new").rename(place)

def meet_fault(case, rank):
    if case["victim"] == rank:
        armed.append(case)
    timeout_s = 60.0 if case["action"] == "raise" else 4.0
    folder = base / f"run-{case['number']}"
    tell(base / f"end-{case['number']}-{rank}", lambda: save(folder, "second", timeout_s))

def go_on(case, rank):
    folder = base / f"run-{case['number']}"
    tell(base / f"again-{case['number']}-{rank}", lambda: save(folder, "third"))

def in_ranks(*works):
    # Each in two ranks of its own.
    ports = [HeldPort() for _ in works]
    pids = []
    for port, work in zip(ports, works):
        for rank in range(2):
            pids.append(os.fork())
            if pids[-1] == 0:
                try:
                    torch.set_num_threads(1)
                    address = f"tcp://127.0.0.1:{port.number}"
                    os.environ |= {"MASTER_ADDR": "127.0.0.1"}
                    dist.init_process_group("gloo", address, rank=rank, world_size=2)
                    work(rank)
                finally:
                    os._exit(0)
    for pid in pids:
        os.waitpid(pid, 0)
    for port in ports:
        port.close()

in_ranks(lambda rank: tell(base / f"begin-{rank}", lambda: save(base / "template", "first")))
for start in range(0, len(cases), at_once):
    some = cases[start:start + at_once]
    for case in some:
        shutil.copytree(base / "template", base / f"run-{case['number']}")
    for work in (meet_fault, go_on):
        in_ranks(*(lambda rank, case=case: work(case, rank) for case in some))
"""


@dataclass(frozen=True, slots=True)
class Case:
    """A fault: what one rank meets, and where."""

    number: int
    phase: str
    operation: str
    victim: int
    action: str

    @property
    def name(self) -> str:
        return f"{self.phase}, rank {self.victim} {self.action}s"


def cases_of(action: str) -> list[Case]:
    places = [*OPENING.items(), *SAVING.items()]
    every = [(phase, operation, rank) for phase, (operation, ranks) in places for rank in ranks]
    return [Case(number, *one, action) for number, one in enumerate(every)]


RAISED = cases_of("raise")
LASTING = [*cases_of("hang"), *cases_of("die")]
QUICK = {
    ("see the session", 1),
    ("read a part", 0),
    ("write a part", 1),
    ("publish", 0),
}


class Faults:
    """What came of a list of faults."""

    def __init__(self, folder: Path, cases: list[Case], *, timeout_s: float) -> None:
        numbered = [Case(n, *list(asdict(one).values())[1:]) for n, one in enumerate(cases)]
        self._folder = folder
        self._numbers = {(one.name): one.number for one in numbered}
        told = json.dumps([asdict(one) for one in numbered])
        at_once = 2 if cases[0].action == "raise" else 4  # those that only wait, wait together
        command = [sys.executable, "-c", PROGRAM, str(folder), told, str(at_once)]
        done = subprocess.run(
            command, check=False, timeout=timeout_s, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert self._told("begin-0") == ["ok", "None"]

    def check(self, case: Case) -> None:
        """Require that every rank was told, that nothing false counts, and that it goes on."""
        number = self._numbers[case.name]
        assert (self._folder / f"met-{number}").exists(), "the phase was not reached"
        is_committed = False
        for rank in range(2):
            if case.action == "die" and rank == case.victim:
                assert not (self._folder / f"end-{number}-{rank}").exists()
                continue
            kind, text = self._told(f"end-{number}-{rank}")
            if case.action == "hang" and rank == case.victim == 0 and kind == "ok":
                is_committed = True  # it had the other's share, and goes on once that has given up
                continue
            assert kind not in ("ok", "not typed"), (kind, text)
            assert rank == case.victim or "planned" in text or f"ank {case.victim}" in text, text
        run = mp.open_run(self._folder / f"run-{number}")
        came = [self._told(f"again-{number}-{rank}") for rank in range(2)]
        assert came == [["ok", came[0][1]]] * 2
        if not (case.phase == "publish" and case.action == "die"):
            assert came[0][1] == ("second" if is_committed else "first")
        latest = run.latest()
        assert latest is not None
        assert latest.name == "third"
        for checkpoint in run.checkpoints():
            assert checkpoint.verify().is_good

    def _told(self, name: str) -> list[Any]:
        return json.loads((self._folder / name).read_text())


@pytest.fixture(scope="module")
def raised(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    return Faults(tmp_path_factory.mktemp("raised"), RAISED, timeout_s=110)


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    quick = [one for one in LASTING if (one.phase, one.victim) in QUICK]
    return Faults(tmp_path_factory.mktemp("lasting"), quick, timeout_s=110)


@pytest.fixture(scope="module")
def all_lasting(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    return Faults(tmp_path_factory.mktemp("all-lasting"), LASTING, timeout_s=1100)


@pytest.mark.parametrize("case", RAISED, ids=lambda case: case.name)
def test_error_on_one_rank_is_told_to_every_rank(raised, case):
    """In each phase; and the run goes on from what was safe."""
    raised.check(case)


@pytest.mark.parametrize(
    "case", [one for one in LASTING if (one.phase, one.victim) in QUICK], ids=lambda case: case.name
)
def test_rank_that_hangs_or_dies_keeps_no_other_waiting(lasting, case):
    """Longer than the deadline says."""
    lasting.check(case)


@pytest.mark.campaign
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", LASTING, ids=lambda case: case.name)
def test_rank_that_hangs_or_dies_anywhere_keeps_no_other_waiting(all_lasting, case):
    """The whole table."""
    all_lasting.check(case)
