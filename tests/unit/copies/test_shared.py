"""One copy on a machine for all who read a remote checkpoint: downloaded once, never half."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from milepost.checkpoint import Checkpoint
from milepost.copies.shared import cache_folder
from milepost.errors import DamagedError, DeadlineError, StorageError, UsageError

SCRIPT = Path(__file__).with_name("reader_script.py")


class Reader:
    """A process that reads the checkpoint."""

    def __init__(self, far, log, how="well") -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(far), str(log), how],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> str:
        return self.process.stdout.readline().strip()

    def say(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)
        self.process.stdin.close()
        self.process.stdout.close()

    def end(self) -> None:
        self.process.communicate("\n", timeout=30)


@pytest.fixture
def start(far, tmp_path, cache):
    with ExitStack() as stack:

        def start(how="well"):
            reader = Reader(far, tmp_path / "log", how)
            stack.callback(reader.kill)
            return reader

        yield start


@pytest.fixture
def opened(tmp_path):
    """Return the lines that readers have logged."""
    return lambda: (tmp_path / "log").read_text().splitlines()


def check(folder, files) -> None:
    found = {path: Path(folder, path).read_bytes() for path in files}
    assert found == files


def test_processes_share_one_download_and_the_last_removes_it(start, files, opened, cache):
    """The second waits for the first, and neither pulls the folder from under the other."""
    readers = [start(), start()]
    heard = {reader: [reader.hear()] for reader in readers}
    for reader in readers:
        if heard[reader][-1] == "reading":
            heard[reader].append(reader.hear())
    folders = {words[-1] for words in heard.values()}
    assert len(folders) == 1
    folder = folders.pop().removeprefix("in ")
    assert len(opened()) == len(files)
    readers[0].end()
    check(folder, files)
    late = start()  # while somebody still reads
    assert late.hear() == f"in {folder}"
    readers[1].end()
    check(folder, files)
    assert len(opened()) == len(files)
    late.end()
    assert list(cache.iterdir()) == []


def test_a_killed_download_is_taken_over(start, files, opened, cache):
    """What the dead one left is thrown away: half a file looks like a whole one."""
    first = start("hang")
    assert first.hear() == "reading"
    second = start()
    assert len(list(cache.glob("*/part-*"))) == 1
    first.kill()
    assert second.hear() == "reading"
    folder = second.hear().removeprefix("in ")
    check(folder, files)
    assert list(cache.glob("*/part-*")) == []
    second.end()
    assert list(cache.iterdir()) == []


def test_who_waits_for_a_download_that_fails_tries_for_itself(start, files, cache):
    """It must not be handed what the other has left, nor hang."""
    first = start("fail")
    assert first.hear() == "reading"
    waiting, other = start(), start("fail")
    first.say()
    assert first.hear() == "error storage The line is down."
    other.say()
    assert waiting.hear() == "reading"
    folder = waiting.hear().removeprefix("in ")
    check(folder, files)
    waiting.end()
    other.end()
    assert list(cache.iterdir()) == []


def test_a_download_that_stands_still_is_not_waited_for(start, cache):
    """The error says for whom, so that a person can end it."""
    first = start("hang")
    assert first.hear() == "reading"
    waiting = start("short")
    heard = waiting.hear()
    assert heard.startswith(f"error deadline Process {first.process.pid} of this machine")


def test_a_reader_that_was_killed_keeps_nothing_for_ever(start, make_remote, cache):
    """Whoever reads next from this machine removes its copy, whatever they read."""
    first = start()
    first.hear()
    folder = first.hear().removeprefix("in ")
    first.kill()
    assert Path(folder).is_dir()
    with Checkpoint(make_remote(), "ep1").as_directory() as again:
        assert again == folder
    assert list(cache.iterdir()) == []


def test_threads_and_nested_blocks_hold_the_copy_each_for_itself(make_remote, files, cache):
    """Of two blocks in one process the inner must not remove what the outer reads."""
    checkpoint = Checkpoint(make_remote(), "ep1")
    entered, leave = threading.Barrier(4, timeout=30), [threading.Event() for _ in range(3)]
    errors = []

    def read(number: int) -> None:
        try:
            with checkpoint.as_directory() as folder:
                entered.wait()
                leave[number].wait(30)
                check(folder, files)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    with checkpoint.as_directory() as outer:
        entered.wait()
        with Checkpoint(make_remote(), "ep1").as_directory() as inner:
            assert inner == outer
        for number, thread in enumerate(threads):
            leave[number].set()
            thread.join(30)
            check(outer, files)
    assert errors == []
    assert list(cache.iterdir()) == []


def test_an_error_in_the_block_comes_out_and_the_copy_goes(make_remote, cache):
    """The user's error, and not one of ours in its place."""
    with pytest.raises(ZeroDivisionError):
        with Checkpoint(make_remote(), "ep1").as_directory():
            raise ZeroDivisionError
    assert list(cache.iterdir()) == []


def test_damage_on_the_way_leaves_no_copy(make_remote, far, cache):
    """Every byte is compared before anybody gets the folder."""
    file = far / "ep1" / "sub" / "c.txt"
    file.write_bytes(b"tixt")
    with pytest.raises(DamagedError, match=r"c\.txt"):
        with Checkpoint(make_remote(), "ep1").as_directory():
            pytest.fail("nobody gets here")
    assert list(cache.iterdir()) == []


def test_a_copy_cannot_be_written_to_by_accident(make_remote, files):
    """Others read the same files."""
    with Checkpoint(make_remote(), "ep1").as_directory() as folder:
        modes = {stat.S_IMODE(Path(folder, path).stat().st_mode) for path in files}
    assert modes == {0o444}


def test_a_new_checkpoint_of_an_old_name_is_not_the_old_copy(make_remote, far, cache):
    """Copies go by what is committed, not by a name."""
    from milepost.runs import delete_checkpoint, list_sessions
    from milepost.stores import LocalStore
    from milepost.testing import save_files

    with Checkpoint(make_remote(), "ep1").as_directory() as old:
        delete_checkpoint(LocalStore(far), "ep1")
        session = list_sessions(LocalStore(far))[-1]
        save_files(LocalStore(far), session, name="ep1", attempt=2, files={"a.bin": b"new"})
        with Checkpoint(make_remote(), "ep1").as_directory() as new:
            assert Path(new, "a.bin").read_bytes() == b"new"
            assert Path(old, "a.bin").read_bytes() == bytes(range(256)) * 100


def test_what_is_not_a_copy_stays_in_the_cache(make_remote, cache):
    """People name a scratch folder that holds their own things."""
    cache.mkdir(parents=True)
    (cache / "mine").mkdir()
    (cache / "mine" / "x").write_text("x")
    (cache / ("0" * 32)).mkdir()
    (cache / ("0" * 32) / "mine").write_text("x")
    with Checkpoint(make_remote(), "ep1").as_directory():
        pass
    assert (cache / "mine" / "x").exists()
    assert (cache / ("0" * 32) / "mine").exists()


@pytest.mark.parametrize("is_named", [False, True])
def test_a_cache_that_others_could_write_to_is_refused(tmp_path, monkeypatch, is_named):
    """Names of such folders can be guessed, and checkpoints are trusted."""
    if is_named:
        monkeypatch.setenv("MILEPOST_CACHE_DIR", str(tmp_path / "new" / "cache"))
    else:
        monkeypatch.delenv("MILEPOST_CACHE_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = cache_folder()
    assert folder.parent == (tmp_path / "new" / "cache" if is_named else tmp_path)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)
    with pytest.raises(UsageError, match="others could change"):
        cache_folder()
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(UsageError):
        cache_folder()


def test_a_deadline_in_the_same_process_names_it(make_remote, cache):
    """Threads wait for each other just as processes do."""
    begun, go_on = threading.Event(), threading.Event()

    def stall(key):
        begun.set()
        go_on.wait(30)
        raise StorageError("down")

    def download():
        with pytest.raises(StorageError):
            with Checkpoint(make_remote(before_read=stall), "ep1").as_directory():
                pass

    thread = threading.Thread(target=download)
    thread.start()
    begun.wait(30)
    with pytest.raises(DeadlineError, match=str(os.getpid())):
        with Checkpoint(make_remote(), "ep1").as_directory(stall_timeout_s=0.05):
            pass
    go_on.set()
    thread.join(30)
    with Checkpoint(make_remote(), "ep1").as_directory():
        pass


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(4))
def test_a_storm_of_readers_that_are_killed(far, make_remote, cache, seed):
    """At any moment, a reader or the one who downloads: nobody ever sees a wrong byte or hangs."""
    draw, num_ok = random.Random(seed), 0
    script = Path(__file__).with_name("storm_script.py")

    def start(number: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(script), str(far), str(number)],
            stdout=subprocess.PIPE,
            text=True,
        )

    readers = [start(number) for number in range(4)]
    for number in range(40):
        threading.Event().wait(draw.random() * 0.3)
        victim = readers.pop(draw.randrange(len(readers)))
        victim.kill()
        lines = victim.communicate(timeout=30)[0].splitlines()
        assert set(lines) <= {"ok"}
        num_ok += len(lines)
        readers.append(start(100 + number))
    for reader in readers:
        reader.kill()
        assert set(reader.communicate(timeout=30)[0].splitlines()) <= {"ok"}
    assert num_ok
    with Checkpoint(make_remote(), "ep1").as_directory():
        pass
    assert list(cache.iterdir()) == []


def test_a_place_that_is_removed_while_it_is_locked_is_made_anew(
    make_remote, files, cache, monkeypatch
):
    """Else two would have the turn: one on the old folder, one on the new."""
    from milepost.copies import shared

    try_lock, removed = shared.try_lock, []

    def remove_first(fd, path, **options):
        if not removed and path.parent == cache:
            removed.append(path)
            path.rmdir()
        return try_lock(fd, path, **options)

    monkeypatch.setattr(shared, "try_lock", remove_first)
    with Checkpoint(make_remote(), "ep1").as_directory() as folder:
        check(folder, files)
    assert removed
    assert list(cache.iterdir()) == []
