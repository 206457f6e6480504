"""What workers can run, and what is refused before anything starts."""

from __future__ import annotations

import functools
import json
import os.path

import numpy as np
import pytest

from milepost.errors import MissingError, UnsupportedStateError, UsageError
from milepost.launch import RunConfig, ScalingConfig
from milepost.launch.entry import call, check_json, find_function, function_entry, script_entry


def no_argument():
    return "none"


def one_argument(config):
    return config


def default_argument(config=5):
    return config


def keyword_needed(config, *, other):
    return config, other


class Trainer:
    def fit(self, config):
        return config


@pytest.mark.parametrize(
    ("function", "config", "result"),
    [
        (no_argument, None, "none"),
        (one_argument, {"a": 1}, {"a": 1}),
        (one_argument, None, None),
        (default_argument, None, 5),
        (default_argument, [1], [1]),
    ],
)
def test_function_gets_the_config_if_it_takes_one(function, config, result):
    """With and without: both are natural to write."""
    function_entry(function, config)
    assert call(function, config) == result


def test_reference_leads_back_to_the_function():
    """It is all that a worker gets."""
    entry = function_entry(os.path.basename, "a/b")
    (reference,) = entry.arguments
    assert find_function(reference) is os.path.basename


@pytest.mark.parametrize(
    "function",
    [
        lambda config: config,
        Trainer().fit,
        Trainer.fit,
        functools.partial(one_argument, 1),
        functools.wraps(one_argument)(lambda config: config),
    ],
    ids=["lambda", "method", "unbound", "partial", "wrapped"],
)
def test_what_workers_cannot_import_is_refused(function):
    """Only the name travels."""
    with pytest.raises(UsageError):
        function_entry(function, {})


def test_function_in_a_function_is_refused():
    """It does not exist before the outer one runs."""

    def inner(config):
        return config

    with pytest.raises(UsageError, match="cannot import"):
        function_entry(inner, {})


@pytest.mark.parametrize(("function", "config"), [(no_argument, {}), (keyword_needed, {})])
def test_function_that_cannot_take_the_config_is_refused(function, config):
    """Before the workers have loaded torch to find out."""
    with pytest.raises(UsageError, match="cannot be called"):
        function_entry(function, config)


def test_missing_function_is_told():
    """One that a module has only as the main program, for example."""
    with pytest.raises(UsageError, match="no function nothing"):
        find_function("os.path:nothing")


@pytest.mark.parametrize(
    "value", [None, True, 3, 2.5, float("inf"), "x", [], {"a": [{"b": None}]}], ids=repr
)
def test_what_comes_back_from_json_is_taken(value):
    """Infinity too: Python's JSON knows it on both sides."""
    check_json(value, "config")
    assert json.loads(json.dumps(value)) == value


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ((1, 2), "config"),
        ({"a": (1,)}, "config['a']"),
        ({"a": [0, {1}]}, "config['a'][1]"),
        ({1: 2}, "the key 1 of config"),
        ({"a": np.float64(1.0)}, "config['a']"),
        (b"x", "config"),
    ],
    ids=repr,
)
def test_what_json_would_change_is_refused_by_its_path(value, path):
    """A tuple that arrives as a list, or a key as text, is a bug that nobody finds."""
    with pytest.raises(UnsupportedStateError) as caught:
        check_json(value, "config")
    assert caught.value.facts["path"] == path


def test_missing_script_is_told_at_once(tmp_path):
    """Not by four workers that each fail."""
    with pytest.raises(MissingError):
        script_entry(tmp_path / "none.py", [])


@pytest.mark.parametrize("num", [(0, 2), (3, 2), -1])
def test_senseless_numbers_of_workers_are_refused(num):
    """There is no training without workers."""
    with pytest.raises(UsageError):
        ScalingConfig(num_workers=num)


@pytest.mark.parametrize(
    "options",
    [{"local_path": "s3://bucket/runs"}, {"name": "a/b"}, {"name": ".."}, {"grace_s": -1}],
    ids=str,
)
def test_senseless_places_are_refused(options):
    """Logs need a folder on this machine, and one of their own."""
    with pytest.raises(UsageError):
        RunConfig(**options)
