"""A save of several ranks, each a thread of this process, with the real messages between them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from milepost.engine.save import Saver, SaveRequest
from milepost.format.manifest import Manifest
from milepost.ranks.server import Server
from milepost.ranks.team import StoreTeam
from milepost.runs.scan import scan
from milepost.runs.sessions import Origin, Session, ensure_run, open_session, record_origin
from milepost.stores.base import Store
from milepost.tensors.pack import PackedItem

TIME = {"epoch": 3, "batch": 40, "batch_in_epoch": 4}


def begin(store: Store) -> Session:
    session = open_session(store, ensure_run(store))
    latest = scan(store).latest()
    origin = Origin(latest.name, latest.session, latest.attempt) if latest else None
    return record_origin(store, session, origin)


def save_on_ranks(
    store: Store, states: Sequence[Sequence[PackedItem]], *, name: str = "ep3", **options: Any
) -> Manifest:
    """Save what each rank holds as one checkpoint; return its manifest, the same on every rank."""
    session = begin(store)
    request = SaveRequest(name=name, reason="interval", time=TIME, metrics={"loss": float("nan")})
    if len(states) == 1:
        saver = Saver(store, session, on_commit=lambda manifest: manifest, **options)
        return saver.save(states[0], request).wait()
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server = Server("127.0.0.1", host.port, host)
    ended: dict[int, Any] = {}

    def run(rank: int) -> None:
        try:
            saver = Saver(
                store,
                session,
                on_commit=lambda manifest: manifest,
                team=StoreTeam(server, rank, len(states), "team"),
                rank_check="none",
                **options,
            )
            ended[rank] = saver.save(states[rank], request).wait(60)
        except BaseException as error:  # noqa: BLE001 - raised below
            ended[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(states))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    errors = [one for one in ended.values() if isinstance(one, BaseException)]
    if errors:
        raise errors[0]
    assert len({one.write_id for one in ended.values()}) == 1
    found: Manifest = ended[0]
    return found


def raw(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return dtype, shape and bytes of tensors by name."""
    import torch

    return {
        key: (
            one.dtype,
            tuple(one.shape),
            one.contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
        )
        if one.numel()
        else (one.dtype, tuple(one.shape), b"")
        for key, one in values.items()
    }
