"""Packing again what was packed before gives what packing it anew gives, whatever has changed."""

from __future__ import annotations

import json
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from milepost.engine.plan import make_plan
from milepost.errors import UnsupportedStateError
from milepost.tensors.pack import pack_item
from milepost.tensors.packing import Packing

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")


def new_state():
    """A state of every kind of container, with ties, views, odd dtypes and plain values."""
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(4, 6, generator=generator)
    tied = torch.randn(5, generator=generator)
    return {
        "model": {
            "a": base,
            "b": base.t(),
            "c": tied,
            "d": tied,
            "e": torch.zeros(0, 3),
            "f": torch.zeros(0, 3),
            "g": torch.ones(3, dtype=torch.bfloat16),
            "h": nn.Parameter(torch.randn(2, 2, generator=generator)),
            "i": torch.randn(2, 3, generator=generator),
            "j": torch.ones(2, dtype=torch.complex64),
        },
        "state": OrderedDict(
            x={"step": torch.tensor(3.0), "m": torch.ones(4), "n": 3},
            y={"step": torch.tensor(4.0), "m": torch.ones(4), "n": 4},
        ),
        "rows": {
            "x": {"step": torch.tensor(1.0), "m": torch.ones(4), "v": torch.zeros(4)},
            "y": {"step": torch.tensor(1.0), "m": torch.ones(2), "v": torch.zeros(2)},
            "z": {"step": torch.tensor(1.0)},
        },
        "groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["x", "y"]}],
        "by number": {0: torch.ones(2), 1: {"z": [torch.ones(1), torch.zeros(2)]}},
        "plain": {"count": 1, "flag": True, "zero": 0.0, "dtype": torch.float32, "none": None},
    }


class Text(str):
    """Text of a class of its own."""

    __slots__ = ()


def rekey(table, old, new):
    found = [(new if key == old else key, value) for key, value in table.items()]
    table.clear()
    table.update(found)


def untie(s):
    s["model"]["d"] = s["model"]["d"].clone()


def tie(s):
    s["model"]["d"] = s["model"]["c"]


def tie_others(s):
    s["state"]["y"]["m"] = s["state"]["x"]["m"]


def swap_ties(s):
    m = s["model"]
    m["c"], m["i"] = torch.ones(2, 3), torch.ones(5)
    m["d"] = m["i"]


def give_data(s, key, value):
    s["model"][key].data = value


CHANGES = {
    "values": lambda s: s["model"]["a"].add_(1),
    "values through data": lambda s: s["model"]["h"].data.fill_(7),
    "other memory": lambda s: s["model"].update(i=s["model"]["i"].clone()),
    "other memory of the same object": lambda s: give_data(s, "h", torch.full((2, 2), 5.0)),
    "another shape of the same object": lambda s: give_data(s, "h", torch.ones(4)),
    "another dtype of the same object": lambda s: give_data(s, "h", torch.ones(2, 2).double()),
    "another stride of the same object": lambda s: give_data(s, "h", torch.rand(2, 2).t()),
    "nothing left of the same object": lambda s: give_data(s, "h", torch.empty(0)),
    "no view any more": lambda s: s["model"].update(b=s["model"]["b"].contiguous()),
    "a tensor for a parameter": lambda s: s["model"].update(h=torch.ones(2, 2)),
    "a parameter for a tensor": lambda s: s["model"].update(i=nn.Parameter(torch.ones(2, 3))),
    "conjugated": lambda s: s["model"].update(j=s["model"]["j"].conj()),
    "negated": lambda s: s["model"].update(
        g=torch.ones(3, dtype=torch.complex64).mul(1j).conj().imag
    ),
    "sparse": lambda s: s["model"].update(i=torch.eye(2).to_sparse()),
    "rows compressed": lambda s: s["model"].update(i=torch.eye(2).to_sparse_csr()),
    "tied": tie,
    "untied": untie,
    "tied elsewhere": tie_others,
    "ties swapped": swap_ties,
    "elements of the empty": lambda s: s["model"].update(e=torch.ones(1, 3)),
    "tied and empty": lambda s: s["model"].update(f=s["model"]["e"]),
    "another key": lambda s: rekey(s["model"], "c", "cc"),
    "another order": lambda s: s["model"].update(a=s["model"].pop("a")),
    "a key more": lambda s: s["model"].update(k=torch.ones(1)),
    "a key less": lambda s: s["model"].pop("g", None),
    "a text of its own class": lambda s: rekey(s["model"], "c", Text("c")),
    "a truth for a number": lambda s: rekey(s["by number"], 1, True),
    "a mark for a key": lambda s: rekey(s["model"], "c", "$"),
    "a number for a tensor": lambda s: s["model"].update(c=3),
    "nothing for a tensor": lambda s: s["model"].update(c=None),
    "a tensor for nothing": lambda s: s["plain"].update(none=torch.ones(1)),
    "one more in a list": lambda s: s["by number"][max(s["by number"])]["z"].append(torch.ones(1)),
    "a plain dict": lambda s: s.update(state=dict(s["state"])),
    "an ordered dict": lambda s: s.update(model=OrderedDict(s["model"])),
    "a list for a tuple": lambda s: s["groups"][0].update(betas=[0.9, 0.99]),
    "another rate": lambda s: s["groups"][0].update(lr=0.2),
    "another group": lambda s: s["groups"].append({"lr": 1.0, "params": []}),
    "a count": lambda s: s["plain"].update(count=2),
    "a truth for a count": lambda s: s["plain"].update(count=True),
    "minus zero": lambda s: s["plain"].update(zero=-0.0),
    "a count among tensors": lambda s: s["state"]["x"].update(n=30),
    "a count of another kind": lambda s: s["state"]["x"].update(n=30.0),
    "another dtype by name": lambda s: s["plain"].update(dtype=torch.float16),
    "a tensor among tuples": lambda s: s["groups"][0].update(betas=(torch.ones(1), 0.9)),
    "a row more": lambda s: s["rows"].update(u={"m": torch.ones(1)}),
    "a row less": lambda s: s["rows"].pop("y", None),
    "a row of another name": lambda s: rekey(s["rows"], "y", "yy"),
    "a row by number": lambda s: rekey(s["rows"], "y", 1),
    "an empty row": lambda s: s["rows"]["z"].clear(),
    "no row": lambda s: s["rows"].update(z=None),
    "a list for a row": lambda s: s["rows"].update(z=[torch.ones(1)]),
    "an ordered row": lambda s: s["rows"].update(y=OrderedDict(s["rows"]["y"])),
    "a row of a text of its own class": lambda s: rekey(s["rows"]["x"], "m", Text("m")),
    "another order in a row": lambda s: s["rows"]["x"].update(m=s["rows"]["x"].pop("m")),
    "moved to the next row": lambda s: s["rows"]["y"].update(v2=s["rows"]["x"].pop("v")),
    "a number in a row": lambda s: s["rows"]["x"].update(step=3),
    "rows in another order": lambda s: s["rows"].update(x=s["rows"].pop("x")),
    "rows in an ordered dict": lambda s: s.update(rows=OrderedDict(s["rows"])),
    "rows tied": lambda s: s["rows"]["y"].update(step=s["rows"]["x"]["step"]),
    "other memory in all rows": lambda s: s.update(
        rows={k: {n: v.clone() for n, v in r.items()} for k, r in s["rows"].items()}
    ),
    "one element in another stride": lambda s: s["rows"]["x"].update(
        m=torch.ones(4, 9)[:, 3].view(4), step=s["rows"]["x"]["step"].as_strided((), ())
    ),
    "values without a place": lambda s: s["model"].update(c=torch.ones(2, device="meta")),
    "nothing at all": lambda s: None,
}


def outcome(pack):
    """What packing gives: text of the tree, leaves, and the bytes of each tensor."""
    try:
        item = pack()
    except UnsupportedStateError as error:
        return str(error)
    seen = [
        (
            one.dtype,
            tuple(one.shape),
            one.stride(),
            one.resolve_neg().resolve_conj().contiguous().view(-1).view(torch.uint8).tolist()
            if one.numel()
            else [],
            (one.is_conj(), one.is_neg()),
        )
        for one in item.tensors
    ]
    return json.dumps(item.tree), item.leaves, seen


@given(steps=st.lists(st.sampled_from(sorted(CHANGES)), max_size=6))
@settings(max_examples=150, deadline=None)
def test_packed_again_is_packed_anew(steps):
    """A form that fits too much would store old names, shapes or ties for new values."""
    state, packing = new_state(), Packing("x")
    for step in ["nothing at all", *steps, "nothing at all"]:
        try:
            CHANGES[step](state)
        except (KeyError, RuntimeError, TypeError, AttributeError, IndexError):
            continue  # not possible after what came before
        for frozen in ((), ("model/c", "model/d", "model/h"), ()):
            leaders = ("model/i",) if frozen else ()
            again = outcome(lambda f=frozen, n=leaders: packing.pack(state, frozen=f, leaders=n))
            anew = outcome(lambda f=frozen, n=leaders: pack_item("x", state, frozen=f, leaders=n))
            assert again == anew


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_each_change_is_seen_in_the_next_save(change):
    """Every kind by itself, after two saves without any."""
    state, packing = new_state(), Packing("x")
    first, second = packing.pack(state), packing.pack(state)
    assert second.leaves is first.leaves
    before = json.dumps(first.tree)
    CHANGES[change](state)
    anew = outcome(lambda: pack_item("x", state))
    assert outcome(lambda: packing.pack(state)) == anew
    assert outcome(lambda: packing.pack(state)) == anew
    assert json.dumps(first.tree) == before  # it may not be written yet


def test_a_plan_is_used_again_while_nothing_but_values_changes():
    """Its layout, its header and the views of the arena cost far more than to look at it."""
    state, packing = new_state(), Packing("x")
    plan = make_plan([packing.pack(state)])
    for change in ("values", "other memory", "another rate", "a count", "a count among tensors"):
        CHANGES[change](state)
        assert make_plan([packing.pack(state)], plan) is plan
    CHANGES["another shape of the same object"](state)
    assert make_plan([packing.pack(state)], plan) is not plan


def test_no_memory_is_kept_between_saves():
    """What its owner lets go of must be free, above all on an accelerator."""
    import weakref

    state, packing = {"a": torch.ones(8)}, Packing("x")
    packing.pack(state)
    packing.pack(state)
    storage = weakref.ref(state["a"].untyped_storage())
    tensor = weakref.ref(state["a"])
    del state
    assert tensor() is None
    assert storage() is None
