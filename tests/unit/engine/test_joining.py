"""What each rank has, joined: the keys of all, and nothing lost or contradicted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import milepost as mp
from milepost.engine.joining import _join, merge
from milepost.state.holders import Holders, join_places
from milepost.tensors.pack import pack_item


def tensor(key: str) -> dict[str, str]:
    return {"$": "tensor", "key": key}


def group(*params: str, lr: float = 0.1) -> dict[str, Any]:
    return {"lr": lr, "params": list(params)}


def joined(*trees: Any) -> Any:
    return _join("item", trees, [[key] for key in "abcde"])


def test_the_keys_of_all_ranks_are_joined_in_their_order() -> None:
    """A reader sees one model, in the order of its stages."""
    first, second = {"a": tensor("a"), "b": tensor("b")}, {"b": tensor("b"), "c": tensor("c")}
    assert list(joined(first, second)) == ["a", "b", "c"]
    assert list(joined({"x": {"a": 1}, "y": 2}, {"x": {"b": 3}})["x"].items()) == [
        ("a", 1),
        ("b", 3),
    ]


def test_groups_with_equal_options_become_one() -> None:
    """Whichever place in its optimizer a rank has them at."""
    first = {"param_groups": [group("a"), group("b", lr=0.2)]}
    second = {"param_groups": [group("c", lr=0.2), group("d"), group("e", lr=0.3)]}
    assert joined(first, second) == {
        "param_groups": [group("a", "d"), group("b", "c", lr=0.2), group("e", lr=0.3)]
    }
    # Two that a rank keeps apart stay apart.
    twice = {"param_groups": [group("a"), group("b")]}
    assert joined(twice, {"param_groups": [group("c"), group("d")]}) == {
        "param_groups": [group("a", "c"), group("b", "d")]
    }


@pytest.mark.parametrize(
    ("first", "second", "where"),
    [
        ({"step": 1}, {"step": 2}, "item/step"),
        ({"x": {"y": [1]}}, {"x": {"y": [2]}}, "item/x/y"),
        ({"a": tensor("a")}, {"a": tensor("b")}, "item/a"),
        ({"a": {"z": 1}}, {"a": 1}, "item/a"),
    ],
)
def test_unequal_values_under_one_name_are_named(first: Any, second: Any, where: str) -> None:
    """Which of them is right nobody can know."""
    with pytest.raises(mp.MismatchError) as caught:
        joined(first, second)
    assert caught.value.facts["names"] == [where]


def test_joining_changes_no_argument() -> None:
    """The tree of a rank is used for its own table too."""
    first = {"param_groups": [group("a")], "others": ["x"], "s": {"a": 1}}
    second = {"param_groups": [group("b")], "others": ["y"], "s": {"b": 1}}
    before = repr((first, second))
    found = merge(first, second, path="", differing=[])
    assert found["others"] == ["x", "y"]
    assert repr((first, second)) == before


def test_what_no_rank_writes_is_found_before_the_commit() -> None:
    """A parameter that moved to another rank would be missing from the checkpoint."""
    with pytest.raises(mp.MismatchError, match="No rank writes item/z"):
        joined({"a": tensor("a")}, {"z": tensor("z")})


def test_ranks_learn_who_holds_what() -> None:
    """What nobody has spoken of is a rank's own."""
    told = [
        {"model": [["a"], ["b"]], "optimizer": [["state", "a"]]},
        {"model": [["b"], ["c"]], "optimizer": [["state", "b"]]},
    ]
    pairs = join_places(told)
    places = {tuple(place): tuple(ranks) for ranks, places in pairs["model"] for place in places}
    assert places == {("a",): (0,), ("b",): (0, 1), ("c",): (1,)}
    with pytest.raises(mp.MismatchError, match="do not mean the same by model"):
        join_places([{"model": None}, {"model": [["a"]]}])
    assert join_places([{"model": None, "other": []}, {"model": None}]) == {}
    holders = Holders(1, places)
    assert holders(("model", "b")) == (0, 1)
    assert holders(("model", "new")) == (1,)
    assert Holders(0, {("state", "x/y"): (2, 3)})(("o", "state", "x/y", "exp_avg")) == (2, 3)


def test_tied_names_that_other_ranks_do_not_tie_are_kept_apart() -> None:
    """One rank would call the tensor by the one name, and another rank by the other."""
    weight = torch.ones(3)
    held = {("head",): (1,), ("embed",): (0, 1), ("again",): (1,)}
    value = {"head": weight, "embed": weight, "again": weight}
    item = pack_item("model", value, home="spread", holders=Holders(1, held))
    assert item.tree["embed"]["key"] == "embed"
    assert item.tree["head"]["key"] == item.tree["again"]["key"] == "head"
    assert {leaf.key: leaf.replicas for leaf in item.leaves} == {"head": (1,), "embed": (0, 1)}
