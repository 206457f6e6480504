"""Every interleaving of a small model of the session rule, with a stop possible at any point.

A model session goes through the steps of ``runs/sessions.py``: create its record, read the
sessions, list the commits, record what it goes on from, and then for each of its commits publish,
look for a newer session, acknowledge. The state is what is in the store and where each session
stands; a session that is never scheduled again has stopped, so an invariant that holds in every
reachable state holds after every stop.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest

from milepost.format.manifest import Manifest
from milepost.runs import Found, Origin, RunRecord, Session, State
from milepost.runs.scan import _members

NUM_COMMITS = 2

Commit = tuple[int, int]
"""Session and attempt."""


@dataclass(frozen=True)
class Life:
    """Where one session stands."""

    step: str = "create"
    number: int = 0
    seen: tuple = ()  # the sessions that it read
    chosen: Commit | None = None
    num_published: int = 0


@dataclass(frozen=True)
class World:
    """What is in the store, and where everyone stands."""

    origins: tuple = ()  # one per session: "open", None, or the commit that it went on from
    commits: frozenset[Commit] = frozenset()
    acked: frozenset[Commit] = frozenset()
    lives: tuple[Life, ...] = ()


def lineage(origins: tuple, commits: frozenset[Commit]) -> set[Commit]:
    """Return the commits that count: the head's, then those that it went on from."""
    settled = [number for number, origin in enumerate(origins, 1) if origin != "open"]
    members: set[Commit] = set()
    number, limit = (settled[-1], NUM_COMMITS) if settled else (0, 0)
    while number:
        members |= {c for c in commits if c[0] == number and c[1] <= limit}
        number, limit = origins[number - 1] or (0, 0)
    return members


def advance(world: World, who: int, *, rechecks: bool, creates_first: bool) -> World:
    """Let one session take its next step."""
    life = world.lives[who]
    order = ["create", "read", "list", "record"]
    if not creates_first:
        order = ["read", "list", "create", "record"]
    following = dict(zip(order, [*order[1:], "publish"], strict=True))
    origins, commits, acked = world.origins, world.commits, world.acked
    match life.step:
        case "create":
            origins = (*origins, "open")
            life = replace(life, number=len(origins), step=following["create"])
        case "read":
            life = replace(life, seen=origins, step=following["read"])
        case "list":
            chosen = max(lineage(life.seen, commits), default=None)
            life = replace(life, chosen=chosen, step=following["list"])
        case "record":
            at = life.number - 1
            origins = (*origins[:at], life.chosen, *origins[at + 1 :])
            life = replace(life, step="publish")
        case "publish":
            published = life.num_published + 1
            commits |= {(life.number, published)}
            life = replace(life, num_published=published, step="recheck")
        case "recheck":
            is_fenced = rechecks and len(origins) > life.number
            life = replace(life, step="fenced" if is_fenced else "ack")
        case "ack":
            acked |= {(life.number, life.num_published)}
            is_over = life.num_published == NUM_COMMITS
            life = replace(life, step="over" if is_over else "publish")
    lives = (*world.lives[:who], life, *world.lives[who + 1 :])
    # Sessions differ in nothing but what they did: one order of them stands for all.
    in_order = sorted(lives, key=lambda life: (life.number, life.step))
    return World(origins, commits, acked, tuple(in_order))


@cache
def reachable(num_sessions: int, *, rechecks: bool = True, creates_first: bool = True):
    """Return every state that any schedule leads to."""
    first = "create" if creates_first else "read"
    start = World(lives=(Life(step=first),) * num_sessions)
    seen, waiting = {start}, [start]
    while waiting:
        world = waiting.pop()
        for who, life in enumerate(world.lives):
            if life.step in ("over", "fenced"):
                continue
            after = advance(world, who, rechecks=rechecks, creates_first=creates_first)
            if after not in seen:
                seen.add(after)
                waiting.append(after)
    return seen


def lost(worlds) -> list[World]:
    """Return the states in which an acknowledged commit does not count."""
    return [world for world in worlds if not world.acked <= lineage(world.origins, world.commits)]


@pytest.mark.parametrize("num_sessions", [1, 2, 3])
def test_an_acknowledged_commit_always_counts(num_sessions):
    """The promise: whatever happens to whom, what was acknowledged is on the lineage."""
    worlds = reachable(num_sessions)
    assert len(worlds) > 8**num_sessions
    assert lost(worlds) == []


def test_the_newest_acknowledged_commit_is_gone_on_from():
    """A session that settles last goes on from everything acknowledged before it was opened."""
    for world in reachable(3):
        newest = max(lineage(world.origins, world.commits), default=(0, 0))
        assert all(commit <= newest for commit in world.acked)


def test_without_the_second_look_commits_are_lost():
    """The model has teeth: the look at the sessions after publishing is what protects."""
    assert lost(reachable(2, rechecks=False))


def test_listing_before_creating_loses_commits():
    """The order of opening a session is not a matter of taste."""
    assert lost(reachable(2, creates_first=False))


def test_the_scan_follows_the_rule_of_the_model():
    """What was proved of the model holds for the code only if both mean the same lineage."""
    stores = {(world.origins, world.commits) for world in reachable(3)}
    assert len(stores) > 100
    for origins, commits in stores:
        names = _members(
            RunRecord("run", "milepost"),
            [session(number, origin) for number, origin in enumerate(origins, 1)],
            [found(commit) for commit in sorted(commits)],
        )
        assert names == {f"s{s}a{a}" for s, a in lineage(origins, commits)}


def session(number: int, origin) -> Session:
    record = Session(number, "run", "host", 1, "boot", 0.0)
    if origin == "open":
        return record
    named = Origin(f"s{origin[0]}a{origin[1]}", *origin) if origin else None
    return replace(record, origin=named, is_settled=True)


def found(commit: Commit) -> Found:
    name = "s{}a{}".format(*commit)
    manifest = Manifest(
        name=name,
        run_id="run",
        session=commit[0],
        attempt=commit[1],
        write_id="w",
        parent=None,
        reason="manual",
        is_final=False,
        created_s=0.0,
        time={},
        metrics={},
        world_size=1,
        layout="files",
        items=(),
        files=(),
        software={},
    )
    return Found(name, State.COMMITTED, manifest, None, False, 0, 0.0, *commit)
