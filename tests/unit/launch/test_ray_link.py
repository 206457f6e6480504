"""Whatever goes wrong with a machine on Ray is told in errors of Milepost."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from milepost.errors import CheckpointError, NodeLostError, StorageError, UsageError
from milepost.launch.ray import RayLink


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause):
        super().__init__(str(cause))
        self.cause = cause


class GetTimeoutError(RayError, TimeoutError):
    pass


class ActorUnavailableError(RayError):
    pass


PROBLEMS = SimpleNamespace(
    RayError=RayError,
    RayTaskError=RayTaskError,
    GetTimeoutError=GetTimeoutError,
    ActorUnavailableError=ActorUnavailableError,
)


def ask(error):
    """Ask a machine, where Ray raises an error in the place of an answer."""

    def get(answer, timeout):
        raise error

    actor = SimpleNamespace(listen=SimpleNamespace(remote=lambda *arguments: None))
    link = RayLink(SimpleNamespace(exceptions=PROBLEMS, get=get), actor, "m1")
    with pytest.raises(CheckpointError) as caught:
        link.ask("listen", 0, 0.2, timeout_s=0.1)
    assert caught.value is error or caught.value.__cause__ is error
    return caught.value


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (RayTaskError(UsageError("no.")), UsageError, "no."),
        (RayTaskError(OSError(24, "Too many open files")), StorageError, "Too many open files"),
        (RayTaskError(KeyError("x")), NodeLostError, "its supervisor failed (listen): KeyError"),
        (RayError("gone"), NodeLostError, "its supervisor has ended"),
        (ActorUnavailableError("cut"), NodeLostError, "the connection to it is broken"),
        (GetTimeoutError("slow"), NodeLostError, "did not answer within 0.1 s (listen)"),
        (RuntimeError("not connected"), NodeLostError, "Ray cannot ask it (listen): RuntimeError"),
    ],
)
def test_every_error_is_of_the_tree(error, kind, told):
    """A launch waits for what is told of a machine, and must not end by an error of Ray."""
    found = ask(error)
    assert type(found) is kind
    assert told in found.what
    if kind is not UsageError:
        assert found.facts["node"] == "m1"
