"""Sessions: numbers, origins, fencing, and what proves that a process has ended."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from milepost.errors import (
    DamagedError,
    ExistsError,
    FencedError,
    MissingError,
    NewerFormatError,
    StorageError,
)
from milepost.format.canonical import dump_record, load_record
from milepost.runs import (
    Identity,
    Origin,
    check_not_fenced,
    ensure_run,
    identity,
    is_provably_dead,
    list_sessions,
    open_session,
    read_run,
    record_origin,
    this_process,
)
from milepost.runs.identity import is_gone
from milepost.stores import MemoryStore
from milepost.testing import Fault, FaultStore

ME = Identity("host", 1, "boot", "1@ns")


def test_a_run_is_created_once(store):
    """Every process that opens it sees one identity."""
    run = ensure_run(store, layout="torch", clock=lambda: 5.0)
    assert ensure_run(store) == run == read_run(store)
    assert (run.layout, run.created_s) == ("torch", 5.0)
    assert len(run.run_id) == 32


def test_no_run_is_said_so(store):
    """The path may be wrong: the message names it."""
    with pytest.raises(MissingError, match="no run at memory://run"):
        read_run(store)


def test_a_newer_run_is_refused(store):
    """Writing into it could break what the newer version relies on."""
    store.put("run.json", dump_record({"format": 99, "run_id": "a", "layout": "milepost"}))
    with pytest.raises(NewerFormatError, match="pip install"):
        ensure_run(store)


def test_a_torn_run_is_damaged_and_not_replaced(store):
    """A new identity would orphan everything."""
    ensure_run(store)
    store.put("run.json", store.get("run.json")[:-9])
    with pytest.raises(DamagedError):
        ensure_run(store)


def test_threads_get_different_numbers(store):
    """Two sessions with one number would both believe that they own the run."""
    run = ensure_run(store)
    with ThreadPoolExecutor(8) as pool:
        sessions = list(pool.map(lambda _: open_session(store, run, identity=ME), range(16)))
    assert sorted(session.number for session in sessions) == list(range(1, 17))


def test_a_number_is_taken_a_bounded_number_of_times():
    """Something is wrong when the next number is always gone: say so, and do not hang."""

    class AlwaysTaken:
        url = "memory://"

        def put_new(self, key, data):
            raise ExistsError("taken")

        def list(self, folder=""):
            return iter(())

    run = ensure_run(MemoryStore())
    with pytest.raises(ExistsError, match="stop all but one"):
        open_session(AlwaysTaken(), run, identity=ME)


def test_an_origin_is_recorded_once(store):
    """What a session goes on from decides what counts: it may not change."""
    session = open_session(store, ensure_run(store), identity=ME)
    assert not session.is_settled
    older = replace(session, number=2)
    origin = Origin("ep1", 1, 4)
    settled = record_origin(store, older, origin)
    assert settled.is_settled
    assert record_origin(store, older, origin) == settled
    with pytest.raises(ExistsError):
        record_origin(store, older, Origin("ep2", 1, 5))


def test_sessions_are_listed_with_their_origins(store):
    """By number, whatever the order of their keys."""
    run = ensure_run(store)
    first = record_origin(store, open_session(store, run, identity=ME), None)
    second = record_origin(store, open_session(store, run, identity=ME), Origin("ep1", 1, 1))
    third = open_session(store, run, identity=ME)
    assert list_sessions(store) == [first, second, third]
    assert [session.is_settled for session in list_sessions(store)] == [True, True, False]


@pytest.mark.parametrize("data", [b"", b"{", b"{}\n", b"\xff" * 50, dump_record({"number": 1})])
def test_an_unreadable_session_still_fences(store, data):
    """Its number was taken by someone: whether it can be read does not matter."""
    run = ensure_run(store)
    session = open_session(store, run, identity=ME)
    store.put_new("sessions/00000002.json", data)
    with pytest.raises(FencedError):
        check_not_fenced(store, session)
    broken = list_sessions(store)[1]
    assert broken.problem
    assert not is_provably_dead(broken, ME)
    assert open_session(store, run, identity=ME).number == 3


def test_a_number_is_taken_while_either_record_is_there(store):
    """Whoever deleted the first one must not make two sessions share a number."""
    run = ensure_run(store)
    record_origin(store, open_session(store, run, identity=ME), None)
    store.delete("sessions/00000001.json")
    session = open_session(store, run, identity=ME)
    assert session.number == 2
    assert record_origin(store, session, None).is_settled


def test_a_session_whose_first_record_was_lost_still_fences(store):
    """It settled, so it may have published after the older one looked."""
    run = ensure_run(store)
    old = record_origin(store, open_session(store, run, identity=ME), None)
    record_origin(store, open_session(store, run, identity=ME), None)
    store.delete("sessions/00000002.json")
    with pytest.raises(FencedError):
        check_not_fenced(store, old)


def test_an_origin_that_differs_says_what_to_do(store):
    """A bare "file exists" names neither the session nor a way out."""
    session = open_session(store, ensure_run(store), identity=ME)
    record_origin(store, session, None)
    with pytest.raises(ExistsError, match=r"session 1 went on from.*Start again"):
        record_origin(store, session, Origin("ep2", 0, 5))


def test_fencing_names_the_new_owner(store):
    """The operator has to find the other process."""
    run = ensure_run(store)
    old = open_session(store, run, identity=ME)
    check_not_fenced(store, old)
    new = open_session(store, run, identity=Identity("gpu-7", 4242, "b", "1@ns"))
    with pytest.raises(FencedError, match="gpu-7, process 4242") as caught:
        check_not_fenced(store, old)
    assert caught.value.facts["newer_session"] == 2
    check_not_fenced(store, new)


def test_a_store_that_cannot_be_listed_does_not_mean_unfenced(store):
    """No answer is not the answer "nobody is there"."""
    session = open_session(store, ensure_run(store), identity=ME)
    broken = FaultStore(store, [Fault(1, error=StorageError("no answer"))])
    with pytest.raises(StorageError):
        check_not_fenced(broken, session)


def test_an_origin_in_the_future_is_damage(store):
    """A cycle of origins would never end."""
    session = open_session(store, ensure_run(store), identity=ME)
    record_origin(store, session, Origin("ep1", 1, 1))
    (listed,) = list_sessions(store)
    assert "cannot go on from" in listed.problem
    assert not listed.is_settled


def here(pid: int, **changes) -> Identity:
    return replace(this_process(), pid=pid, **changes)


def session_of(store, identity: Identity):
    return open_session(store, ensure_run(store), identity=identity)


@pytest.fixture
def me(monkeypatch) -> Identity:
    monkeypatch.setattr("socket.gethostname", lambda: "machine")
    return replace(this_process(), machine_id="0123")


def test_a_living_process_is_not_dead(store, me):
    """Neither this one nor its parent."""
    assert not is_provably_dead(session_of(store, me), me)
    from milepost.runs.identity import process_start

    parent = replace(me, pid=os.getppid(), process_start=process_start(os.getppid()))
    assert not is_provably_dead(session_of(store, parent), me)


def test_an_ended_process_is_dead(store, me):
    """Its number is free again."""
    code = "from milepost.runs import this_process as t; print(t().pid, t().process_start)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    pid, start = done.stdout.split()
    assert is_provably_dead(session_of(store, replace(me, pid=int(pid), process_start=start)), me)


def test_a_number_that_was_given_out_again_is_another_process(store, me):
    """The pid lives, the writer does not."""
    start = f"1{me.process_start}"
    assert is_provably_dead(session_of(store, replace(me, process_start=start)), me)


@pytest.mark.parametrize("error", [FileNotFoundError, PermissionError])
def test_a_process_that_is_hidden_is_not_dead(store, me, monkeypatch, error):
    """Clusters hide the processes of others; whoever takes them for ended breaks off uploads."""
    parent = replace(me, pid=os.getppid(), process_start=identity.process_start(os.getppid()))
    session, missing = session_of(store, parent), replace(me, pid=2**22 + 1)
    read_text = Path.read_text

    def hide(self, *args, **kwargs):
        if self.name == "stat":
            raise error(self)
        return read_text(self, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", hide)
    assert not is_provably_dead(session, me)
    assert is_gone(missing, me)


@pytest.mark.parametrize("errno_of_kill", [PermissionError, ProcessLookupError])
def test_the_system_says_whether_a_hidden_process_lives(me, monkeypatch, errno_of_kill):
    """To be refused is to be told that there is one."""

    def kill(pid, signal):
        assert signal == 0
        raise errno_of_kill

    other = replace(me, pid=2**22 + 1)
    monkeypatch.setattr(os, "kill", kill)
    assert is_gone(other, me) == (errno_of_kill is ProcessLookupError)


@pytest.mark.parametrize("pid", [0, -1, 2**70, "", "7"])
def test_a_number_that_no_process_has_is_asked_nobody_for(me, pid):
    """A record may say anything; 0 and -1 stand for many processes."""
    assert is_gone(replace(me, pid=pid), me)


def test_another_start_of_the_machine_proves_it(store, me):
    """No process survives that."""
    assert is_provably_dead(session_of(store, replace(me, boot_id="other")), me)


@pytest.mark.parametrize(
    "changes",
    [
        {"host": "elsewhere", "boot_id": "other"},
        {"process_start": "1@another-namespace"},
        {"process_start": ""},
        {"boot_id": ""},
        {"machine_id": "4567", "boot_id": "other"},
        {"machine_id": "", "boot_id": "other"},
    ],
)
def test_what_cannot_be_seen_from_here_is_not_proved(store, me, changes):
    """Another machine, another container, or too little known."""
    assert not is_provably_dead(session_of(store, replace(me, pid=2**22 + 1, **changes)), me)


def test_a_name_that_many_machines_bear_proves_nothing(store, monkeypatch):
    """Two machines called localhost have different starts and may both live."""
    monkeypatch.setattr("socket.gethostname", lambda: "localhost")
    me = replace(this_process(), machine_id="0123")
    assert not is_provably_dead(session_of(store, replace(me, boot_id="other")), me)


def test_a_machine_that_does_not_know_itself_proves_nothing(store, me):
    """Two that know nothing are not thereby the same."""
    me = replace(me, machine_id="")
    assert not is_provably_dead(session_of(store, replace(me, boot_id="other")), me)


def test_the_record_of_an_older_version_proves_nothing(store, me):
    """It does not say which machine it was."""
    session_of(store, replace(me, boot_id="other"))
    fields = load_record(store.get("sessions/00000001.json"), where="record")
    assert is_provably_dead(list_sessions(store)[0], me)
    assert fields.pop("machine_id") == "0123"
    store.put("sessions/00000001.json", dump_record(fields))
    (old,) = list_sessions(store)
    assert not old.problem
    assert not is_provably_dead(old, me)


INSTALLED, HARDWARE = "3d1219c7c4c5404aaa1f6d2a48adfda4", "4C4C4544-0042-3510-8052-B7C04F4A5931"


@pytest.fixture
def ids(monkeypatch, tmp_path):
    """Write the two files that tell machines apart; ``None`` leaves one out."""

    def write(*texts: str | None) -> str:
        paths = [tmp_path / "machine-id", tmp_path / "product_uuid"]
        for path, text in zip(paths, texts, strict=True):
            path.unlink(missing_ok=True)
            if text is not None:
                path.write_text(text)
        return this_process().machine_id

    monkeypatch.setattr(
        "milepost.runs.identity._MACHINE_IDS",
        (tmp_path / "machine-id", tmp_path / "product_uuid"),
    )
    return write


def test_machines_are_told_apart_by_what_is_known_of_them(ids):
    """An image that both start from gives them one number, but not one piece of hardware."""
    both = ids(f"{INSTALLED}\n", f"{HARDWARE}\n")
    assert both == ids(INSTALLED, HARDWARE.lower())
    others = [
        ids(INSTALLED, None),
        ids(None, HARDWARE),
        ids(INSTALLED, HARDWARE.replace("4", "5")),
        ids(INSTALLED.replace("3", "4"), HARDWARE),
    ]
    assert len({both, *others}) == 5
    assert all(INSTALLED not in one and HARDWARE not in one for one in others)


@pytest.mark.parametrize(
    "text", [None, "", "uninitialized\n", "0" * 32, "F" * 32, "Not Settable", "\u00e9" * 32]
)
def test_a_number_that_was_not_filled_in_is_none(ids, text):
    """Every machine of that make has it."""
    assert ids(text, text) == ""
    assert ids(text, HARDWARE) == ids(None, HARDWARE)


def test_a_number_that_is_kept_secret_is_none(ids, monkeypatch):
    """That of the hardware is for the administrator only."""
    expected = ids(INSTALLED, None)
    real = Path.read_text

    def read_text(path, *args, **options):
        if path.name == "product_uuid":
            raise PermissionError(path)
        return real(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", read_text)
    assert ids(INSTALLED, HARDWARE) == expected
