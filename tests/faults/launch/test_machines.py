"""Workers on several machines: found, followed, and brought back by the same rules.

The machines are this one, several times: real nodes and real workers, reached by calls in place of
messages. What a machine does when it dies is that its calls fail.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest

from milepost.errors import LaunchFailedError, NodeLostError, StorageError
from milepost.launch import Ending, FailureConfig, RunConfig, ScalingConfig, launch
from milepost.launch.engine import Ended, Told
from milepost.launch.node import Changes, Node
from milepost.launch.remote import RemoteGroup, check_machines


class Machine:
    """A node that can be lost."""

    address = "127.0.0.1"

    def __init__(self, name, *, place=None):
        self.name = name
        self.place = place
        self.node = Node()
        self.is_lost = False

    def ask(self, method, *arguments, timeout_s, **options):
        self.check_there()
        if method == "check" and self.place is not None:
            options["place"] = self.place
        answer = getattr(self.node, method)(*arguments, **options)
        self.check_there()  # an answer on its way is lost too
        return answer

    def check_there(self):
        if self.is_lost:
            raise NodeLostError(f"The machine {self.name} is lost.", node=self.name)

    def die(self):
        """End as a machine does: with all that is on it, and without a word."""
        self.is_lost = True
        self.node.kill()
        self.node.close()
        self.node.remove()


class Machines:
    """An engine for machines with a number of workers each; new ones for each attempt."""

    def __init__(self, *counts, place=None):
        self.counts = counts
        self.place = place
        self.attempts = []

    def __enter__(self):
        return self

    def __exit__(self, *problem):
        pass

    def reserve(self, fewest, most):
        return sum(self.counts)

    def group(self, plan, events):
        machines = [Machine(f"m{n}") for n, _ in enumerate(self.counts)]
        if self.place is not None:
            machines[-1].place = self.place
        self.attempts.append(machines)
        engine = self

        class Group(RemoteGroup):
            def start(self):
                check_machines(machines, plan.place, needed=["job.py"], timeout_s=30.0)
                super().start()

            def close(self):
                super().close()
                engine.check_closed(machines)

        return Group(
            plan,
            machines,
            self.counts,
            events=events,
            working_folder=str(Path.cwd()),
            silent_s=30.0,
        )

    def check_closed(self, machines):
        for machine in machines:
            assert not machine.node._folder.exists()


def run(jobs, body, engine, **failures):
    options = {"backoff_s": 0.0, "grace_s": 60.0, **failures}
    Path("runs").mkdir(exist_ok=True)
    return launch(
        jobs.script(body),
        scaling=ScalingConfig(num_workers=sum(engine.counts)),
        run=RunConfig(failure_config=FailureConfig(**options)),
        engine=engine,
    )


def test_ranks_are_numbered_over_machines_and_told_where_they_stand(jobs, capfd):
    """As torchrun tells them; what they print comes here, whole and once."""
    threads = threading.active_count()
    result = run(
        jobs,
        """
        print("out", rank, "x" * 5_000)
        note(f"env-{rank}", json.dumps(dict(os.environ)))
        """,
        Machines(2, 1),
    )
    names = ["LOCAL_RANK", "NODE_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "WORLD_SIZE"]
    envs = [json.loads((jobs.folder / f"env-{rank}").read_text()) for rank in range(3)]
    found = [[env[name] for name in names] for env in envs]
    assert found == [
        ["0", "0", "2", "2", "3"],
        ["1", "0", "2", "2", "3"],
        ["0", "1", "1", "2", "3"],
    ]
    shared = [{env[name] for env in envs} for name in ("MASTER_PORT", "MILEPOST_MEET")]
    assert [len(one) for one in shared] == [1, 1]
    assert {env["MASTER_ADDR"] for env in envs} == {"127.0.0.1"}
    assert envs[0]["MILEPOST_MEET"] != f"127.0.0.1:{envs[0]['MASTER_PORT']}"
    for rank in range(3):
        log = (result.folder / f"attempt-1/rank-{rank}.log").read_text()
        assert log == f"out {rank} {'x' * 5_000}\n"
    assert capfd.readouterr().out == f"out 0 {'x' * 5_000}\n"
    assert threading.active_count() == threads
    assert [one.name for one in Path("runs").iterdir()] == ["launched"]


def test_failure_on_another_machine_is_told_and_all_come_back(jobs, capfd):
    """With its traceback, its checkpoint and its batches, which were written over there."""
    result = run(
        jobs,
        """
        if attempt == 1 and rank == 2:
            liveness.beat(12)
            liveness.beat(13)
            liveness.note_commit("ba10", 10)
            wait_for("up")
            raise ValueError("sample 7 is broken")
        def lost(number, frame):
            raise ConnectionError("lost a peer")
        signal.signal(signal.SIGTERM, lost)
        note("up")
        time.sleep(600 if attempt == 1 else 0)
        """,
        Machines(2, 1),
        max_failures=1,
    )
    assert [one.ending for one in result.attempts] == [Ending.FAILED, Ending.DONE]
    cause = result.attempts[0].cause
    assert (cause.rank, cause.text) == (2, "ValueError: sample 7 is broken")
    assert 'job.py", line' in cause.traceback
    assert result.last_commit == "ba10"
    assert "checkpoint: ba10 (batch 10); 3 batches lost" in capfd.readouterr().err


def test_lost_machine_is_the_cause_and_takes_its_ranks_with_it(jobs, capfd):
    """Peers complain long before anybody knows that a whole machine is gone."""
    engine = Machines(1, 2)

    def end_machine():
        jobs.wait_until(lambda: all((jobs.folder / f"up-{rank}").exists() for rank in range(3)))
        machine = engine.attempts[0][1]
        machine.die()

    killer = threading.Thread(target=end_machine)
    killer.start()
    result = run(
        jobs,
        """
        note(f"up-{rank}", os.getpid())
        if attempt == 1:
            if rank == 0:
                time.sleep(0.2)
                raise ConnectionError("lost a peer")
            time.sleep(600)
        """,
        engine,
        max_failures=1,
    )
    killer.join()
    assert [one.ending for one in result.attempts] == [Ending.FAILED, Ending.DONE]
    lost = [one for one in result.attempts[0].failures if one.is_lost]
    assert [one.rank for one in lost] == [1, 2]
    assert result.attempts[0].cause == lost[0]
    assert "cause:      rank 1: The machine m1 is lost" in capfd.readouterr().err


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), RuntimeError("odd")])
def test_machine_that_fails_to_tell_of_its_workers_ends_the_attempt(jobs, error, caplog):
    """Whatever the error is: nobody else tells of their end. The workers there are ended too."""
    engine = Machines(1, 1)
    groups = engine.group

    def group(plan, events):
        made = groups(plan, events)
        if plan.number == 1:
            machine = engine.attempts[0][1]
            ask = machine.ask

            def fail(method, *arguments, **options):
                if method in ("listen", "signal"):
                    jobs.wait_until((jobs.folder / "up-1").exists)
                    raise error
                return ask(method, *arguments, **options)

            machine.ask = fail
        return made

    engine.group = group
    result = run(
        jobs,
        """
        note(f"up-{rank}", os.getpid()) if attempt == 1 else None
        time.sleep(600 if attempt == 1 else 0)
        """,
        engine,
        max_failures=1,
    )
    assert [one.ending for one in result.attempts] == [Ending.FAILED, Ending.DONE]
    cause = result.attempts[0].cause
    assert cause.rank == 1
    assert f"The workers on the machine m1 cannot be followed: {error!r}" in cause.text
    assert "Nothing is heard of the workers on m1" in caplog.text
    assert "The machine m1 failed (signal)" in caplog.text
    jobs.check_gone(*jobs.pids("up-1"))


def test_what_is_told_late_of_an_attempt_does_not_touch_the_next(jobs, monkeypatch):
    """Neither the wait before it, nor the workers of the same rank in it."""
    engine = Machines(1, 1)
    groups = engine.group
    queues = []

    def tell_late(text):
        del text
        if len(engine.attempts) == 1:
            queues[0].put(Ended(1, 0, None, "late"))
            queues[0].put(Told(1, 0, 1))

    def group(plan, events):
        queues.append(events)
        if plan.number == 2:
            events.put(Told(1, 1, 1))
            events.put(Ended(1, 0, None, "later"))
        return groups(plan, events)

    engine.group = group
    monkeypatch.setattr("milepost.launch.recovery.say", tell_late)
    result = run(jobs, "sys.exit(3 * (attempt == 1))", engine, max_failures=1)
    assert [one.ending for one in result.attempts] == [Ending.FAILED, Ending.DONE]


def test_answer_that_got_lost_is_sent_again(jobs):
    """An end of a worker that nobody hears of would be waited for for ever."""
    engine = Machines(1, 1)
    groups = engine.group

    def group(plan, events):
        made = groups(plan, events)
        for machine in engine.attempts[-1]:
            machine.ask = twice(machine.ask)
        return made

    def twice(ask):
        def ask_twice(method, *arguments, **options):
            if method not in ("start", "remove"):
                ask(method, *arguments, **options)
            return ask(method, *arguments, **options)

        return ask_twice

    engine.group = group
    result = run(jobs, "print('once'); sys.exit(3 * (attempt == 1))", engine, max_failures=1)
    assert [one.ending for one in result.attempts] == [Ending.FAILED, Ending.DONE]
    assert (result.folder / "attempt-2/rank-1.log").read_text() == "once\n"


def test_hang_on_another_machine_is_found(jobs):
    """By its beats, which come with the messages; and its stack is told."""
    result = run(
        jobs,
        """
        def stuck_here():
            time.sleep(600)
        liveness.beat()
        if attempt == 1 and rank == 1:
            stuck_here()
        for _ in range(30 if attempt == 1 else 1):
            time.sleep(0.1)
            liveness.beat()
        """,
        Machines(1, 1),
        max_failures=1,
        hang_timeout_s=1.5,
    )
    assert [one.ending for one in result.attempts] == [Ending.HUNG, Ending.DONE]
    assert result.attempts[0].cause.rank == 1
    assert "stuck_here" in result.attempts[0].cause.traceback


def test_machine_that_does_not_see_the_place_is_refused_before_anything_starts(jobs, tmp_path):
    """Its checkpoints would be where nobody finds them; and it is named."""
    (tmp_path / "elsewhere").mkdir()
    engine = Machines(1, 1, place=str(tmp_path / "elsewhere"))
    with pytest.raises(StorageError, match="The machine m1 cannot take part") as caught:
        run(jobs, "note('never')", engine)
    assert caught.value.facts["node"] == "m1"
    assert not (jobs.folder / "never").exists()
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert [one.name for one in Path("runs").iterdir()] == ["launched"]
    for machine in engine.attempts[0]:
        machine.die()


def test_workers_of_all_machines_can_save_when_the_launcher_is_asked_to_end(jobs):
    """The signal goes on to each of them."""
    timer = threading.Timer(0, lambda: None)

    def ask_to_end():
        jobs.pids("up-0", "up-1")
        os.kill(os.getpid(), signal.SIGTERM)

    timer.function = ask_to_end
    timer.start()
    with pytest.raises(SystemExit) as caught:
        run(
            jobs,
            """
            def end(number, frame):
                note(f"saved-{rank}", number)
                sys.exit(128 + number)
            signal.signal(signal.SIGTERM, end)
            note(f"up-{rank}", os.getpid())
            time.sleep(600)
            """,
            Machines(1, 1),
        )
    timer.join()
    assert caught.value.code == 143
    assert jobs.pids("saved-0", "saved-1") == [15, 15]


def test_function_and_its_result_travel(jobs, monkeypatch):
    """The result is written on the machine of rank 0, and read here."""
    Path("job_far_away.py").write_text("def train(config):\n    return {**config, 'b': 2}\n")
    Path("job.py").write_text("")
    monkeypatch.syspath_prepend(jobs.folder)
    import job_far_away  # type: ignore[import-not-found]

    Path("runs").mkdir()
    engine = Machines(1, 1)
    scaling = ScalingConfig(num_workers=2)
    result = launch(job_far_away.train, config={"a": 1}, scaling=scaling, engine=engine)
    assert result.return_value == {"a": 1, "b": 2}


def test_machine_that_is_lost_at_the_start_fails_the_launch_in_words(jobs):
    """Nothing has worked yet; and no worker of the others stays."""
    engine = Machines(1, 1)
    groups = engine.group

    def group(plan, events):
        made = groups(plan, events)
        machine = engine.attempts[-1][1]
        ask = machine.ask

        def lost_at_start(method, *arguments, **options):
            if method == "start":
                machine.die()
            return ask(method, *arguments, **options)

        machine.ask = lost_at_start
        return made

    engine.group = group
    with pytest.raises(NodeLostError, match="m1"):
        run(jobs, "note('up', os.getpid()); time.sleep(600)", engine)
    if Path("up").exists():
        jobs.check_gone(*jobs.pids("up"))


def test_too_many_failures_end_the_launch_with_what_was_written_elsewhere(jobs):
    """The same error, the same facts."""
    with pytest.raises(LaunchFailedError, match="ValueError: broken") as caught:
        run(jobs, "raise ValueError('broken')", Machines(1))
    assert caught.value.facts["result"].error.text == "ValueError: broken"


def test_changes_are_told_once_and_long_logs_in_pieces(tmp_path):
    """A worker that prints a gigabyte must not fill the memory of its supervisor."""
    changes = Changes(tmp_path)
    assert changes.pieces() == ()
    data = os.urandom(9 << 20)
    (tmp_path / "rank-0.log").write_bytes(data)
    (tmp_path / "rank-0.beat").write_text("3")
    (tmp_path / ".rank-1.beat").write_text("hidden")
    told, names = b"", []
    while pieces := changes.pieces():
        for one in pieces:
            names.append(one.name)
            if one.offset is not None:
                assert one.offset == len(told)
                told += one.data
        assert sum(len(one.data) for one in pieces) <= 4 << 20
    assert told == data
    assert not changes.has_more
    assert names.count("rank-0.beat") == 1
    with (tmp_path / "rank-0.log").open("ab") as file:
        file.write(b"more")
    (piece,) = changes.pieces()
    assert (piece.offset, piece.data) == (len(data), b"more")
