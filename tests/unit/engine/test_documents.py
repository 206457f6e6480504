"""The index of a checkpoint is the same text, whatever was kept from the one before."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.engine import documents as written
from milepost.engine.documents import TreeTexts, documents

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
FINITE = LEAVES.filter(lambda value: value not in (float("inf"), float("-inf")))
TREES = st.recursive(
    FINITE, lambda one: st.lists(one) | st.dictionaries(st.text(), one), max_leaves=30
)


def plain(trees):
    """What the index holds, written by the standard encoder in one go."""
    items = {name: {"tree": tree, "files": []} for name, tree in trees.items()}
    index = {"format": written.FORMAT_VERSION, "items": items}
    return json.dumps(index, separators=(",", ":")).encode("ascii")


@pytest.fixture(autouse=True, scope="module")
def _small_is_large():
    """Keep texts of small containers too."""
    before, written._LARGE = written._LARGE, 2
    yield
    written._LARGE = before


@given(st.lists(st.dictionaries(st.text(max_size=4), TREES, max_size=4), min_size=1, max_size=4))
def test_texts_that_were_kept_change_nothing(saves):
    """Also of trees that share parts with those before, and of new ones in the same memory."""
    texts = TreeTexts()
    for trees in saves:
        again = {**trees, "again": list(trees.values()), "deep": {"x": [trees, trees]}}
        for one in (trees, again, trees):
            assert documents(one, (), texts=texts)["index.json"] == plain(one)


def test_only_what_is_new_is_written_anew(monkeypatch):
    """A counter beside 10,000 tensors must not cost what they do."""
    texts = TreeTexts()
    state = {f"t{n}": {"$": "tensor", "key": f"t{n}"} for n in range(10_000)}
    first = {"model": state, "optimizer": {"state": state, "groups": [{"lr": 0.1}]}}
    documents(first, (), texts=texts)
    encoded = []
    dumps = json.dumps
    monkeypatch.setattr(
        written,
        "json",
        SimpleNamespace(dumps=lambda value, **how: encoded.append(1) or dumps(value, **how)),
    )
    second = {"model": state, "optimizer": {"state": state, "groups": [{"lr": 0.2}]}}
    found = documents(second, (), texts=texts)["index.json"]
    assert len(encoded) < 60
    assert found == plain(second)
