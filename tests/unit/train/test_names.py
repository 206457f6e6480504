"""Keys of stored state: unique, stable, chosen by the user where wanted."""

from __future__ import annotations

import pytest

from milepost.errors import DuplicateNameError
from milepost.train import Callback
from milepost.train.names import name_all


class A(Callback):
    pass


class B(Callback):
    pass


class Named(Callback):
    def __init__(self, name: str) -> None:
        self.name = name


def test_second_of_a_class_gets_a_number_in_the_order_given() -> None:
    """Two callbacks of one class must not share one state."""
    first, second, other, third = A(), A(), B(), A()
    named = name_all([first, second, other, third], kind="callback")
    assert named == {"A": first, "A-2": second, "B": other, "A-3": third}


def test_own_names_win_over_numbers() -> None:
    """A user's choice stays, and the automatic one moves out of its way."""
    plain, chosen = A(), Named("A")
    assert name_all([plain, chosen], kind="callback") == {"A-2": plain, "A": chosen}


def test_equal_own_names_are_refused() -> None:
    """One of them would overwrite the other's state."""
    with pytest.raises(DuplicateNameError, match="'x'"):
        name_all([Named("x"), Named("x")], kind="callback")


def test_classes_made_in_functions_keep_a_short_name() -> None:
    """The function a class was written in may be renamed between two starts."""

    class Local(Callback):
        pass

    assert list(name_all([Local()], kind="callback")) == ["Local"]
