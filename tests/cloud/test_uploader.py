"""The run directory of a training, copied to an object store while it is trained in."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import milepost as mp
from milepost.stores import (
    MemoryStore,
    ObjectStoreProvider,
    ObjectStoreProviderHparams,
    PrefixStore,
)
from milepost.testing import Fault, FaultStore, read_key
from milepost.testing.forking import Forked, start_script
from milepost.testing.proxy import (
    Answer,
    FaultProxy,
    Forward,
    HangUp,
    Request,
    error_answer,
    fault_proxy,
    first,
)
from milepost.testing.ranks import run_ranks
from milepost.train import RunDirectoryUploader
from milepost.uploads.destination import Destination
from milepost.uploads.lanes import Lanes
from milepost.uploads.process import UploadProcess

from .conftest import KEY, SECRET, is_put

pytestmark = pytest.mark.cloud

TRAIN = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
import milepost as mp
from milepost.train import RunDirectoryUploader

endpoint, epochs, folder, prefix = sys.argv[1:]
host, port = endpoint.removeprefix("http://").split(":")
hparams = mp.ObjectStoreProviderHparams(
    provider="s3", container="runs", key_environ="STORE_KEY", secret_environ="STORE_SECRET",
    region="us-east-1", host=host, port=int(port), extra_init_kwargs={"secure": False},
)
torch.manual_seed(0)
model = torch.nn.Linear(600, 600)
data = TensorDataset(torch.randn(8, 600), torch.randn(8, 600))
trainer = mp.Trainer(
    model=model, train_dataloader=DataLoader(data, batch_size=4), progress_bar=False, seed=1,
    optimizers=torch.optim.Adam(model.parameters()), loss_fn=torch.nn.functional.mse_loss,
    max_duration=f"{epochs}ep", save_folder=folder, resume="auto",
    callbacks=RunDirectoryUploader(hparams, prefix, num_concurrent_uploads=2),
)
trainer.fit()
"""


@pytest.fixture
def proxy(s3_endpoint: str) -> Iterator[FaultProxy]:
    with fault_proxy(s3_endpoint) as one:
        yield one


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STORE_KEY", KEY)
    monkeypatch.setenv("STORE_SECRET", SECRET)
    monkeypatch.chdir(tmp_path)


def s3(endpoint: str) -> ObjectStoreProviderHparams:
    where = urlsplit(endpoint)
    return ObjectStoreProviderHparams(
        provider="s3",
        container="runs",
        key_environ="STORE_KEY",
        secret_environ="STORE_SECRET",
        region="us-east-1",
        host=where.hostname,
        port=where.port,
        extra_init_kwargs={"secure": False},
    )


class Notes(mp.Callback):
    """Writes a file in the run directory, at the very end too."""

    def batch_end(self, state: mp.State) -> None:
        self.path = Path(state.run_directory or "") / "rank_0" / "notes.txt"
        with self.path.open("a") as file:
            file.write(f"{state.timer.batch}\n")

    def close(self) -> None:
        with self.path.open("a") as file:
            file.write("closed\n")


def make(*callbacks: mp.Callback, features: int = 4, **options: Any) -> mp.Trainer:
    torch.manual_seed(0)
    model = torch.nn.Linear(features, features)
    data = TensorDataset(torch.randn(16, features), torch.randn(16, features))
    options.setdefault("save_folder", "checkpoints")
    options.setdefault("max_duration", "2ep")
    return mp.Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=4),
        optimizers=torch.optim.Adam(model.parameters()),
        loss_fn=torch.nn.functional.mse_loss,
        callbacks=callbacks,
        progress_bar=False,
        seed=1,
        **options,
    )


def check_copy(root: Path, store: Any) -> None:
    """Everything under its own name, and the pointer as a text."""
    held = {entry.key: read_key(store, entry.key) for entry in store.list()}
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink():
            assert held.pop(path.relative_to(root).as_posix()) == path.read_bytes()
    assert {key.rpartition("/")[2] for key in held} <= {"latest"}


@pytest.mark.parametrize("kind", ["s3", "libcloud"])
@pytest.mark.parametrize("use_procs", [True, False])
def test_a_run_goes_up_and_is_gone_on_with_from_there(
    kind: str, use_procs: bool, s3_endpoint: str, tmp_path: Path, monkeypatch
) -> None:
    """Checkpoints, notes, and what callbacks write as they are closed; under documented names."""
    name = f"{kind}-{use_procs}-{time.time_ns()}"
    hparams = s3(s3_endpoint)
    if kind == "libcloud":
        pytest.importorskip("fasteners")
        (tmp_path / "containers" / "runs").mkdir(parents=True)
        monkeypatch.setenv("STORE_KEY", str(tmp_path / "containers"))
        hparams = ObjectStoreProviderHparams(
            provider="local", container="runs", key_environ="STORE_KEY"
        )
    uploader = RunDirectoryUploader(hparams, use_procs=use_procs)
    notes = Notes()
    trainer = make(uploader, notes, features=600, run_name=name)
    trainer.fit()
    provider = hparams.initialize_object()
    root = tmp_path / "runs" / name
    assert trainer.state.run_directory == str(root)
    check_copy(root, PrefixStore(provider.store, name))
    assert notes.path.read_text().endswith("8\nclosed\n")
    weights = root / "rank_0" / "checkpoints" / "ep2" / "model.safetensors"
    uri = f"{provider.provider_name}://runs/{name}/rank_0/checkpoints/ep2/model.safetensors"
    assert uploader.get_uri_for_uploaded_file(weights) == uri
    relative = weights.relative_to(tmp_path)
    assert uploader.get_uri_for_uploaded_file(str(relative)) == uri
    with pytest.raises(mp.UsageError, match="not in the run directory"):
        uploader.get_uri_for_uploaded_file(tmp_path / "other")
    run = mp.open_run(PrefixStore(provider.store, f"{name}/rank_0/checkpoints"))
    assert [one.name for one in run.checkpoints()] == ["ep1", "ep2"]
    assert all(one.verify().is_good for one in run.checkpoints())
    other = make(
        features=600,
        save_folder=None,
        max_duration="3ep",
        load_path_format=f"{name}/rank_0/checkpoints/ep2",
        load_object_store=hparams,
        load_progress_bar=False,
    )
    assert other.state.timer.batch == 8
    assert other.state.model.weight.equal(trainer.state.model.weight)


class Wait(mp.Callback):
    """Holds the training at a batch until something is in the store."""

    def __init__(self, store: Any, at: dict[int, str]) -> None:
        self.store, self.at = store, at

    def batch_start(self, state: mp.State) -> None:
        key = self.at.get(state.timer.batch)
        deadline_s = time.monotonic() + 30
        while key is not None and key not in {entry.key for entry in self.store.list()}:
            assert time.monotonic() < deadline_s, f"{key} did not come"
            time.sleep(0.01)


def test_what_is_saved_at_a_point_goes_up_with_it(tmp_path: Path) -> None:
    """And not one point later: here the next one would never come."""
    store = MemoryStore()
    wait = Wait(store, {2: "ba2/manifest.json", 3: "ba2/manifest.json"})
    uploader = RunDirectoryUploader(store, "", use_procs=False, upload_every_n_batches=2)
    trainer = make(
        uploader, wait, save_folder=tmp_path / "here", save_interval="1ba", max_duration="1ep"
    )
    trainer.fit()
    check_copy(tmp_path / "here", store)
    assert (
        uploader.get_uri_for_uploaded_file("here/ep1/index.json") == f"{store.url}/ep1/index.json"
    )
    trainer.fit(duration="1ep")
    check_copy(tmp_path / "here", store)
    assert mp.open_run(store).latest().name == "ep2"


def test_a_refused_upload_is_raised_or_tried_again(proxy: FaultProxy, tmp_path: Path) -> None:
    """By the policy; in both cases what is here is safe, and the last word is the last round's."""

    def refuse(request: Request, forward: Forward) -> Answer:
        return error_answer(403, "AccessDenied")

    def is_first_checkpoint(request: Request) -> bool:
        return is_put(request) and "/ep1/index.json" in request.path

    prefix = f"refused-{time.time_ns()}"
    hparams = s3(proxy.endpoint)
    store = hparams.initialize_object().store
    proxy.rule = first(1, refuse, only=is_first_checkpoint)
    uploader = RunDirectoryUploader(hparams, f"{prefix}/a", use_procs=False, on_upload_error="warn")
    make(uploader, save_folder=tmp_path / "a").fit()
    check_copy(tmp_path / "a", PrefixStore(store, f"{prefix}/a"))

    proxy.rule = first(None, refuse, only=is_first_checkpoint)
    uploader = RunDirectoryUploader(hparams, f"{prefix}/b", use_procs=False)
    with pytest.raises(mp.AccessError, match="403"):
        make(uploader, save_folder=tmp_path / "b", max_duration="9ep").fit()
    assert mp.open_run(tmp_path / "b").latest().verify().is_good
    shown = mp.open_run(PrefixStore(store, f"{prefix}/b")).checkpoints()
    assert all(one.verify().is_good for one in shown)
    assert "ep1" not in [one.name for one in shown]

    uploader = RunDirectoryUploader(hparams, f"{prefix}/c", use_procs=False, on_upload_error="warn")
    make(uploader, save_folder=tmp_path / "c").fit()  # told in the log, with what is missing
    assert [one.name for one in mp.open_run(PrefixStore(store, f"{prefix}/c")).checkpoints()] == [
        "ep2"
    ]


def test_the_end_waits_for_so_long_and_no_longer(tmp_path: Path) -> None:
    """An upload that hangs is an error that says so."""
    go_on = threading.Event()

    def before(number: int, operation: str) -> None:
        if "ep1/manifest.json" in operation and operation.startswith("put"):
            go_on.wait(60)

    uploader = RunDirectoryUploader(
        FaultStore(MemoryStore(), before=before), use_procs=False, upload_timeout_s=0.5
    )
    trainer = make(uploader, save_folder=tmp_path / "a", max_duration="1ep")
    timer = threading.Timer(1.5, go_on.set)  # what hangs cannot be stopped, but nothing follows it
    timer.start()
    with pytest.raises(mp.DeadlineError, match=r"did not end within 0\.5 s"):
        trainer.fit()
    timer.join()
    assert mp.open_run(tmp_path / "a").latest().name == "ep1"
    trainer.fit(duration="1ep")


class At(mp.Callback):
    """Does something when a batch begins."""

    def __init__(self, batch: int, call: Callable[[], None]) -> None:
        self.batch, self.call = batch, call

    def batch_start(self, state: mp.State) -> None:
        if state.timer.batch == self.batch:
            self.call()


@pytest.mark.parametrize("how", ["error", "exit", "signal"])
def test_h34_an_early_end_waits_for_the_uploads(how: str, s3_endpoint: str, tmp_path: Path) -> None:
    """What was saved because of it is there too, and whole. Upload processes end by themselves."""

    def end() -> None:
        if how == "error":
            raise ZeroDivisionError
        if how == "exit":
            raise SystemExit(3)
        for pid in _children(os.getpid()):
            with suppress(FileNotFoundError, ProcessLookupError):
                if "milepost.uploads" in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

    ends = {"error": ZeroDivisionError, "exit": SystemExit, "signal": mp.Preempted}
    prefix = f"early-{how}-{time.time_ns()}"
    uploader = RunDirectoryUploader(s3(s3_endpoint), prefix, upload_every_n_batches=1)
    trainer = make(
        uploader, At(6, end), save_folder=tmp_path / "a", features=600, save_interval="1ba"
    )
    with pytest.raises(ends[how]):
        trainer.fit()
    store = PrefixStore(s3(s3_endpoint).initialize_object().store, prefix)
    check_copy(tmp_path / "a", store)
    newest = mp.open_run(store).latest()
    assert newest.name == {"signal": "ba7"}.get(how, "ba6")
    assert newest.verify().is_good


RANKS = """
import milepost as mp
from milepost.train import RunDirectoryUploader
from torch.utils.data import DataLoader, TensorDataset

os.chdir(FOLDER)
os.environ["STORE_KEY"] = f"{FOLDER}/to-{rank}"
hparams = mp.ObjectStoreProviderHparams(
    provider="local", container="runs", key_environ="STORE_KEY"
)
class Notes(mp.Callback):
    def epoch_end(self, state):
        place = f"{state.run_directory}/rank_{rank}"
        os.makedirs(place, exist_ok=True)
        open(f"{place}/notes-{rank}.txt", "w").close()
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
data = TensorDataset(torch.randn(16, 4), torch.randn(16, 4))
trainer = mp.Trainer(
    model=model, train_dataloader=DataLoader(data, batch_size=4), progress_bar=False, seed=1,
    optimizers=torch.optim.SGD(model.parameters(), lr=0.1), max_duration="1ep", save_folder="c",
    loss_fn=torch.nn.functional.mse_loss, run_name="n",
    callbacks=[Notes(), RunDirectoryUploader(hparams, use_procs=False)],
)
trainer.fit()
trainer.close()
"""


@pytest.mark.dist
def test_each_rank_uploads_its_own_folder_and_rank_0_the_rest(tmp_path: Path) -> None:
    """Every file once, also where ranks on other machines have folders of their own."""
    for rank in range(2):
        (tmp_path / f"to-{rank}" / "runs").mkdir(parents=True)
    (tmp_path / "runs" / "n" / "rank_7").mkdir(parents=True)
    (tmp_path / "runs" / "n" / "rank_7" / "of another time").touch()
    (tmp_path / "runs" / "n" / "rank_7" / "old").touch()
    run_ranks(f"FOLDER = {str(tmp_path)!r}\n" + RANKS, 2)
    held = []
    for rank in range(2):
        folder = tmp_path / f"to-{rank}" / "runs" / "n"
        held.append({str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file()})
    assert held[1] == {"rank_1/notes-1.txt"}
    assert held[0] >= {"rank_0/notes-0.txt", "rank_7/old", "rank_0/c/ep1/manifest.json"}
    assert mp.open_run(tmp_path / "to-0" / "runs" / "n" / "rank_0" / "c").latest().verify().is_good


def test_a_process_that_dies_is_replaced(s3_endpoint: str, tmp_path: Path) -> None:
    """Its upload fails and says why; the next one has a process of its own."""
    path = tmp_path / "file"
    path.write_bytes(b"1" * 3_000_000)
    destination = Destination(s3(s3_endpoint))
    lanes = Lanes(destination, num_lanes=1, use_procs=True)
    key = f"process-{time.time_ns()}"
    try:
        starting = UploadProcess(destination)
        for number in (signal.SIGTERM, signal.SIGINT):  # to the whole group, as a scheduler does
            starting._process.send_signal(number)
        starting.send(key, str(path), progress=lambda _: None)
        starting._process.send_signal(signal.SIGTERM)
        starting.send(key, str(path), progress=lambda _: None)
        starting.close()
        assert lanes.run([lambda: lanes.send(key, str(path))]) == []
        (process,) = lanes._all
        process.kill()
        (died,) = lanes.run([lambda: lanes.send(key, str(path))])
        assert isinstance(died, mp.StorageError)
        assert "SIGKILL" in str(died)
        assert lanes.run([lambda: lanes.send(key, str(path))]) == []
        (missing,) = lanes.run([lambda: lanes.send(key, str(tmp_path / "none"))])
        assert isinstance(missing, mp.MissingError)
    finally:
        lanes.close()
    assert read_key(destination.store, key) == path.read_bytes()
    assert SECRET not in destination.recipe()


def test_a_killed_training_leaves_a_whole_copy_and_the_next_sends_the_rest(
    proxy: FaultProxy, tmp_path: Path
) -> None:
    """Its upload processes end with it."""
    prefix, folder = f"killed-{time.time_ns()}", tmp_path / "here"
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    reached, go_on = threading.Event(), threading.Event()

    def hold(request: Request, forward: Forward) -> Answer:
        reached.set()
        go_on.wait(60)
        raise HangUp

    def is_second_manifest_near(request: Request) -> bool:
        return is_put(request) and "/ep2/optimizers.safetensors" in request.path

    def start(epochs: int) -> Forked:
        arguments = [proxy.endpoint, str(epochs), str(folder), prefix]
        env = {"OMP_NUM_THREADS": "1"}
        return start_script(script, *arguments, log=tmp_path / "train.log", env=env)

    def puts(name: str) -> int:
        return len([one for one in proxy.seen if is_put(one) and one.path.endswith(name)])

    proxy.rule = first(None, hold, only=is_second_manifest_near)
    process = start(2)
    assert reached.wait(60)
    children = _children(process.pid)
    assert children
    process.kill()
    deadline_s = time.monotonic() + 30
    while [pid for pid in children if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline_s, "an upload process outlived its parent"
        time.sleep(0.05)
    go_on.set()
    store = PrefixStore(s3(proxy.endpoint).initialize_object().store, prefix)
    assert [one.name for one in mp.open_run(store).checkpoints()] == ["ep1"]
    proxy.rule = lambda request, forward: forward(request)
    assert start(3).wait(60) == 0
    check_copy(folder, store)
    found = mp.open_run(store).checkpoints()
    assert [one.name for one in found] == ["ep1", "ep2", "ep3"]
    assert all(one.verify().is_good for one in found)
    assert puts("/ep1/model.safetensors") == 1
    assert puts("/ep2/manifest.json") == 1


def _children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(one) for path in found for one in path.read_text().split()]


def test_what_makes_no_sense_is_said_at_once(tmp_path: Path, monkeypatch) -> None:
    """Before anything is trained."""
    store = MemoryStore()
    for wrong in ({"num_concurrent_uploads": 0}, {"upload_every_n_batches": 0}):
        with pytest.raises(mp.UsageError, match="at least 1"):
            RunDirectoryUploader(store, use_procs=False, **wrong)
    with pytest.raises(mp.UsageError, match="neither"):
        RunDirectoryUploader(store, use_procs=False, on_upload_error="ignore")  # type: ignore[arg-type]
    with pytest.raises(mp.UsageError, match="cannot begin"):
        RunDirectoryUploader(store, "a b", use_procs=False)
    with pytest.raises(mp.UsageError, match="secrets"):
        RunDirectoryUploader(store)
    (tmp_path / "runs").mkdir()
    monkeypatch.setenv("STORE_KEY", str(tmp_path))
    made = ObjectStoreProvider("local", "runs", {"key": str(tmp_path)})
    with pytest.raises(mp.UsageError, match="secrets"):
        RunDirectoryUploader(made)
    RunDirectoryUploader(
        ObjectStoreProviderHparams(
            provider="local", container="runs", key_environ="STORE_KEY"
        ).initialize_object()
    )
    uploader = RunDirectoryUploader(store, use_procs=False)
    with pytest.raises(mp.UsageError, match="not known yet"):
        uploader.get_uri_for_uploaded_file("a")
    with pytest.raises(mp.UsageError, match="no run directory"):
        make(uploader, save_folder=None)
    failing = FaultStore(MemoryStore(), [Fault(1, error=mp.AccessError("refused"))])
    with pytest.raises(mp.AccessError, match="refused"):
        make(
            RunDirectoryUploader(failing, use_procs=False, upload_every_n_batches=1),
            save_folder=tmp_path / "a",
            max_duration="500ep",
            save_interval="500ep",
        ).fit()
