"""Retention with validations: whatever was asked, found or is still awaited."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from milepost.runs import (
    Identity,
    KeepBest,
    Validation,
    ValidationStatus,
    decide,
    ensure_run,
    open_session,
    prune,
    record_origin,
    scan,
)
from milepost.runs.validations import (
    Request,
    record_verdict,
    request_validation,
    validation_id,
)
from milepost.stores import MemoryStore
from milepost.testing import save_files

VALUES = st.none() | st.sampled_from([0.0, 1.0, 2.0, -1.0, math.nan, math.inf, -math.inf])
VERDICTS = st.sampled_from([None, *ValidationStatus])


@given(
    st.lists(st.tuples(VALUES, VERDICTS, VALUES), min_size=1, max_size=7),
    st.sampled_from(["min", "max"]),
    st.integers(1, 3),
)
def test_pending_ones_stay_and_the_best_by_verdicts_stay(made, mode, count):
    """What is left is the newest, all that is pending, and the best of the others."""
    store = MemoryStore("run")
    session = open_session(store, ensure_run(store), identity=Identity("h", 1, "b", "1@n", "m"))
    session = record_origin(store, session, None)
    scores: dict[str, float | None] = {}
    pending, names, is_known = set(), [], False
    for number, (reported, status, found) in enumerate(made, start=1):
        name = f"ep{number}"
        metrics = {} if reported is None else {"loss": reported}
        manifest = save_files(
            store, session, name=name, attempt=number, files={"a": b"a"}, metrics=metrics
        )
        names.append(name)
        value = reported
        if status is not None:
            request_validation(store, name, manifest.write_id, Request())
        if status is ValidationStatus.PENDING:
            pending.add(name)
        elif status is not None:
            is_validated = status is ValidationStatus.VALIDATED and found is not None
            metrics = {"loss": found} if is_validated else {}
            value = found if is_validated else reported
            verdict = Validation(name, validation_id(manifest.write_id), status, metrics)
            record_verdict(store, verdict, write_id=manifest.write_id)
        is_known = is_known or value is not None
        scores[name] = value
    ranked = [
        name
        for name in names
        if name not in pending and scores[name] is not None and not math.isnan(scores[name])
    ]
    sign = 1 if mode == "min" else -1
    # Of equal ones the newer is better.
    best = sorted(ranked, key=lambda name: (sign * scores[name], -names.index(name)))[:count]
    expected = {names[-1], *pending, *best} if is_known else set(names)
    if ranked:
        assert scan(store).best("loss", mode).name == best[0]
    else:
        assert scan(store).best("loss", mode) is None
    prune(store, decide(scan(store), [KeepBest(count, "loss", mode)]), session=session)
    assert {one.name for one in scan(store).lineage()} == expected
    left = {entry.key.partition("/")[2].partition("-")[0] for entry in store.list("validations")}
    assert left <= expected
