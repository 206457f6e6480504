"""Providers by the names of libcloud: whole objects, and places for runs."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

import milepost as mp
from milepost.format.digest import BLOCK_BYTES
from milepost.stores import ObjectStoreProvider, ObjectStoreProviderHparams, Store, open_store
from milepost.stores.cloud import CloudStore
from milepost.stores.libcloud import LibcloudStore, make_driver
from milepost.stores.prefix import PrefixStore
from milepost.testing import StoreConformance

from .conftest import KEY, SECRET

pytestmark = pytest.mark.cloud
pytest.importorskip("libcloud")
_numbers = itertools.count()


class TestLibcloud(StoreConformance):
    """Whole objects in a folder, by libcloud's own driver for one; without conditions."""

    @pytest.fixture(autouse=True)
    def _take_folder(self, tmp_path: Path) -> None:
        pytest.importorskip("fasteners")
        self.folder = tmp_path

    def make_store(self) -> Store:
        name = f"c{next(_numbers)}"
        (self.folder / name).mkdir()
        options = {"key": str(self.folder)}
        return LibcloudStore("local", name, make=lambda: make_driver("local", options))

    @pytest.mark.skip(reason="the driver for folders replaces a file in two steps")
    def test_put_replaces_in_one_step(self) -> None:
        """See the module."""


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStoreProviderHparams:
    pytest.importorskip("fasteners")
    (tmp_path / "containers" / "runs").mkdir(parents=True)
    monkeypatch.setenv("STORE_KEY", str(tmp_path / "containers"))
    return ObjectStoreProviderHparams(provider="LOCAL", container="runs", key_environ="STORE_KEY")


@pytest.fixture
def s3(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> ObjectStoreProviderHparams:
    monkeypatch.setenv("STORE_KEY", KEY)
    monkeypatch.setenv("STORE_SECRET", SECRET)
    where = urlsplit(s3_endpoint)
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


@pytest.fixture(params=["s3", "local"])
def provider(request: pytest.FixtureRequest) -> ObjectStoreProvider:
    hparams: ObjectStoreProviderHparams = request.getfixturevalue(request.param)
    return hparams.initialize_object()


def test_files_go_up_and_come_down(provider: ObjectStoreProvider, tmp_path: Path) -> None:
    """Small and large, replaced or not, by streams or whole."""
    for name, size in (("small", 1000), ("large", 2 * BLOCK_BYTES + 77)):
        source, done = tmp_path / name, []
        source.write_bytes(os.urandom(size))
        provider.upload_object(source, f"up/{name}", progress=done.append)
        assert sum(done) == size
        source.write_bytes(os.urandom(size))
        provider.upload_object(source, f"up/{name}")
        assert provider.get_object_size(f"up/{name}") == size
        target = tmp_path / f"{name}.down"
        provider.download_object(f"up/{name}", target)
        assert target.read_bytes() == source.read_bytes()
        with pytest.raises(mp.ExistsError):
            provider.download_object(f"up/{name}", target)
        provider.download_object(f"up/{name}", target, overwrite_existing=True)
        stream = provider.download_object_as_stream(f"up/{name}", chunk_size=1_000_000)
        assert b"".join(stream) == source.read_bytes()
    provider.upload_object_via_stream(iter([b"1", b"2"]), "up/streamed")
    assert [one.key for one in provider.list_objects("up/s")] == ["up/small", "up/streamed"]
    for one in list(provider.list_objects("up/")):
        provider.delete_object(one.key)
    provider.delete_object("up/small")
    assert list(provider.list_objects("up/")) == []
    with pytest.raises(mp.MissingError):
        provider.get_object_size("up/small")
    with pytest.raises(mp.MissingError):
        provider.download_object("up/small", tmp_path / "nope")
    assert sorted(one.name for one in tmp_path.glob("*part*")) == []
    assert provider.get_uri("a/b") == f"{provider.provider_name}://runs/a/b"


@pytest.mark.parametrize("kind", ["s3", "local"])
def test_a_run_lives_at_a_provider(kind: str, request: pytest.FixtureRequest) -> None:
    """The provider, what makes it, or its store: each is a place."""
    hparams: ObjectStoreProviderHparams = request.getfixturevalue(kind)
    store = PrefixStore(open_store(hparams), "run")
    model = torch.nn.Linear(3, 2)
    with mp.Checkpointer(store, model=model) as run:
        run.save("a", wait=True)
    weights = mp.open_run(store).get("a").load(["model"])["state"]["model"]["weight"]
    assert weights.equal(model.weight)
    assert open_store(hparams.initialize_object()).url == open_store(hparams).url


def test_libcloud_has_addresses(
    local: ObjectStoreProviderHparams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the command line, with the secrets in the environment."""
    monkeypatch.setenv("LIBCLOUD_KEY", os.environ["STORE_KEY"])
    model = torch.nn.Linear(3, 2)
    with mp.Checkpointer("libcloud://local/runs/some/run", model=model) as run:
        run.save("a", wait=True)
    assert mp.open_run("libcloud://local/runs/some/run").latest().name == "a"
    with pytest.raises(mp.UsageError, match="names no container"):
        open_store("libcloud://local")


def test_a_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not the value of another."""
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(mp.UsageError, match="NO_SUCH_KEY"):
        ObjectStoreProviderHparams(
            provider="s3", container="c", key_environ="NO_SUCH_KEY"
        ).initialize_object()


def test_a_missing_container_is_said_at_once(
    s3: ObjectStoreProviderHparams, local: ObjectStoreProviderHparams
) -> None:
    """By both clients, and not as an empty place."""
    import dataclasses

    for hparams in (s3, local):
        with pytest.raises(mp.StorageError) as caught:
            dataclasses.replace(hparams, container="nope").initialize_object()
        assert not isinstance(caught.value, mp.MissingError)


def test_secrets_are_not_shown(s3: ObjectStoreProviderHparams) -> None:
    """Wherever a provider is printed."""
    provider = s3.initialize_object()
    assert isinstance(provider.store, CloudStore)
    for text in (repr(s3), repr(provider), repr(vars(provider)), repr(provider.store)):
        assert SECRET not in text


def test_an_unknown_provider_is_refused() -> None:
    """With where to look for names."""
    with pytest.raises(mp.UsageError, match="no storage provider"):
        ObjectStoreProviderHparams(provider="nonsense", container="c").initialize_object()


def test_a_trainer_starts_from_an_object(s3: ObjectStoreProviderHparams, tmp_path: Path) -> None:
    """By the provider, by what makes it, or by the address of the checkpoint."""
    model = torch.nn.Linear(3, 2)
    torch.save({"state": {"model": model.state_dict()}}, tmp_path / "ep1.pt")
    provider = s3.initialize_object()
    provider.upload_object(tmp_path / "ep1.pt", "old/ep1.pt")
    for source in (s3, provider):
        other = torch.nn.Linear(3, 2)
        mp.Trainer(
            model=other,
            loss_fn=torch.nn.functional.mse_loss,
            max_duration="1ep",
            train_dataloader=[(torch.zeros(1, 3), torch.zeros(1, 2))],
            optimizers=torch.optim.SGD(other.parameters(), lr=0.0),
            load_path_format="old/ep1.pt",
            load_object_store=source,
            load_weights_only=True,
            load_progress_bar=False,
        )
        assert other.weight.equal(model.weight)
