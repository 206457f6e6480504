"""From what people write to a store."""

from __future__ import annotations

from pathlib import Path

import pytest

from milepost.errors import UsageError
from milepost.launch import RunConfig
from milepost.stores import LocalStore, MemoryStore, PrefixStore, open_store
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


@pytest.mark.parametrize("place", ["s3://", "az://c/x"])
def test_an_address_that_no_client_can_be_made_of_is_refused(place, monkeypatch):
    """Not later, when the first checkpoint is due."""
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(UsageError, match="No client"):
        open_store(place)


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
