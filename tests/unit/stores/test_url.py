"""From what people write to a store."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from milepost import (
    Checkpoint,
    Checkpointer,
    copy_checkpoint,
    open_run,
    sync_run,
)
from milepost.checkpoint import open_checkpoint
from milepost.cli.app import app
from milepost.cli.places import path_of, target_of
from milepost.errors import UsageError
from milepost.integrations.dcp.writer import StorageWriter
from milepost.launch import RunConfig
from milepost.stores import LocalStore, MemoryStore, PrefixStore, open_store
from milepost.stores.cloud import CloudStore
from milepost.stores.url import settled


@pytest.mark.parametrize("wrap", [str, Path, lambda p: f"file://{p}", lambda p: f"FILE://{p}"])
def test_a_path_and_a_file_url_are_a_folder(tmp_path, wrap):
    """All the ways of naming a folder name the same one."""
    store = open_store(wrap(tmp_path / "run"))
    assert isinstance(store, LocalStore)
    assert store.url == f"file://{tmp_path}/run"


def test_a_file_url_may_be_quoted(tmp_path):
    """As a browser or another library writes it."""
    assert open_store(f"file://{tmp_path}/a%20b").url == f"file://{tmp_path}/a b"


def test_a_store_is_itself():
    """Whoever has made a store passes it on."""
    for store in (MemoryStore(), PrefixStore(MemoryStore(), "a")):
        assert open_store(store) is store


@pytest.mark.parametrize(
    "place", ["s3://b/k", "gs://b/k", "az://c/k", "abfss://c@a.dfs.core.windows.net/k"]
)
def test_buckets_are_opened_by_their_addresses(place, tmp_path, monkeypatch):
    """And never become a folder called s3: in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    store = open_store(f"{place}/")
    assert store.url == place
    assert not store.traits.is_local
    assert list(tmp_path.iterdir()) == []


def test_an_address_that_no_client_can_be_made_of_is_refused(monkeypatch):
    """Not later, when the first checkpoint is due."""
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(UsageError, match="No client"):
        open_store("az://c/x")


@pytest.mark.parametrize(
    "place", ["s3://", "s3:///", "s3:///run", "S3://", "gs://", "az:///x", "libcloud://"]
)
def test_an_address_without_a_bucket_is_nowhere_a_folder(place, tmp_path, monkeypatch):
    """It is what a script writes whose variable is not set; nobody looks in a folder ``s3:``."""
    monkeypatch.chdir(tmp_path)
    with Checkpointer("run", model=torch.nn.Linear(2, 2), handle_signals=False) as run:
        run.save("a", wait=True)
    torch.save({"weight": torch.zeros(1)}, "old.pt")
    uses = [
        settled,
        open_store,
        open_run,
        open_checkpoint,
        Checkpoint.from_directory,
        target_of,
        CloudStore,
        lambda one: RunConfig(storage_path=one),
        lambda one: copy_checkpoint("run/a", one),
        lambda one: sync_run("run", one),
        lambda one: StorageWriter().reset(one),
    ]
    for use in uses:
        with pytest.raises(UsageError, match=r"names no (bucket|container)"):
            use(place)
    for words in (["cp", "run/a"], ["import", "old.pt"], ["doctor"], ["ls"], ["bench"]):
        answer = CliRunner().invoke(app, [*words, place])
        assert answer.exit_code == 2, (words, answer.output)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["old.pt", "run"]


def test_dcp_takes_no_bucket_for_a_checkpoint():
    """Cut at its last slash, it would name a folder ``s3:`` as the run."""
    with pytest.raises(UsageError, match="names a bucket"):
        StorageWriter().reset("s3://bucket/")


@pytest.mark.parametrize("place", ["file://host/etc", "FILE://nas/runs", "file://nas"])
def test_commands_refuse_a_folder_of_another_machine(place):
    """Without the name of the machine it would be ``/etc`` of this one."""
    for use in (path_of, target_of, open_checkpoint, Checkpoint.from_directory):
        with pytest.raises(UsageError, match="names another machine"):
            use(place)


def test_checkpoints_are_copied_to_the_address_of_a_folder(tmp_path, monkeypatch):
    """Not to a folder ``file:`` below this one."""
    monkeypatch.chdir(tmp_path)
    with Checkpointer("run", model=torch.nn.Linear(2, 2), handle_signals=False) as run:
        run.save("a", wait=True)
    report = copy_checkpoint(f"file://{tmp_path}/run/a", f"file://{tmp_path}/b%20c")
    assert report.url == f"file://{tmp_path}/b c"
    assert open_checkpoint(f"file://{tmp_path}/b%20c").verify(level="full").is_good
    assert sorted(one.name for one in tmp_path.iterdir()) == ["b c", "run"]


@pytest.mark.parametrize("place", ["", "ftp://host/x", "file://host/x", "file://", b"bytes"])
def test_what_names_no_place_is_refused(place):
    """With words and not with a traceback of the file system."""
    with pytest.raises(UsageError):
        open_store(place)


def test_a_secret_in_a_place_is_not_repeated():
    """Keys are sometimes written into URLs; messages end up in logs."""
    with pytest.raises(UsageError) as caught:
        open_store("s3://KEY:SECRET@bucket/run")
    assert "SECRET" not in str(caught.value)
    assert "SECRET" not in repr(caught.value.facts)


def test_an_address_of_a_folder_stays_that_folder(tmp_path, monkeypatch):
    """Made absolute as if it were a path, it would name a folder ``file:`` below this one."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for place in (f"file://{tmp_path}/a%20b", "~/a b", "a b", Path("a b")):
        assert settled(place) == f"{tmp_path}/a b"
        assert RunConfig(storage_path=place).place == f"{tmp_path}/a b/launched"
        assert RunConfig(local_path=place).folder == tmp_path / "a b/launched"


@pytest.mark.parametrize("place", ["file://nas/runs", "FILE://nas", "file://", ""])
def test_a_folder_of_another_machine_is_nowhere_a_folder_of_this_one(place):
    """Without the name of the machine it would be another folder, and nobody would look there."""
    for use in (settled, open_store, lambda one: RunConfig(storage_path=one)):
        with pytest.raises(UsageError):
            use(place)
    if place:
        with pytest.raises(UsageError, match="names another machine"):
            RunConfig(local_path=place)
