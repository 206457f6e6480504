"""What is asked of validations is checked before the training begins."""

from __future__ import annotations

import json
import math

import pytest

import milepost as mp
from milepost.errors import UnsupportedStateError, UsageError


def validate(checkpoint, rate=1.0):
    return {"rate": rate}


def test_a_configuration_travels_as_json():
    """From the launcher to the process that supervises; the function by its name."""
    task = mp.ValidationTaskConfig(fn_kwargs={"rate": 2.0}, timeout_s=3.0)
    config = mp.ValidationConfig(validate, task, max_concurrent=2, max_retries=0, grace_s=1.0)
    again = mp.ValidationConfig.from_json(json.loads(json.dumps(config.to_json())))
    assert again.reference == config.reference
    assert again.fn == f"{__name__}:validate"
    assert (again.task_config, again.max_concurrent) == (task, 2)
    assert (again.max_retries, again.grace_s) == (0, 1.0)
    assert mp.ValidationConfig.from_json(again.to_json()) == again


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: mp.ValidationConfig(lambda c: {}), "cannot import"),
        (lambda: mp.ValidationConfig(3), "is no function"),
        (lambda: mp.ValidationConfig("module.function"), "names no function"),
        (lambda: mp.ValidationConfig(validate, max_concurrent=0), "max_concurrent=0"),
        (lambda: mp.ValidationConfig(validate, max_concurrent=True), "max_concurrent=True"),
        (lambda: mp.ValidationConfig(validate, max_retries=-1), "max_retries=-1"),
        (lambda: mp.ValidationConfig(validate, grace_s=math.nan), "grace_s=nan"),
        (lambda: mp.ValidationTaskConfig(timeout_s=0), "timeout_s=0"),
        (lambda: mp.ValidationTaskConfig(timeout_s=math.nan), "timeout_s=nan"),
        (lambda: mp.ValidationTaskConfig(fn_kwargs=[1]), "no dictionary"),
        (
            lambda: mp.ValidationConfig(validate, mp.ValidationTaskConfig(fn_kwargs={"rte": 1})),
            "cannot be called",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make, words):
    """At once, and not with the first checkpoint."""
    with pytest.raises(UsageError, match=words):
        make()


def test_arguments_that_json_cannot_hold_are_refused():
    """The error leads to the value."""
    with pytest.raises(UnsupportedStateError, match=r"fn_kwargs\['sizes'\]"):
        mp.ValidationTaskConfig(fn_kwargs={"sizes": (1, 2)})
