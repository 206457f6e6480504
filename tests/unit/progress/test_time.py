"""Time: numbers with a unit of training progress."""

from __future__ import annotations

import pickle
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.errors import UsageError
from milepost.progress.time import Time, TimeUnit


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("3ep", 3, "ep"),
        ("0ba", 0, "ba"),
        ("1_000ba", 1000, "ba"),
        ("1e6tok", 1_000_000, "tok"),
        ("2.5e1sp", 25, "sp"),
        ("-4ba", -4, "ba"),
        ("0.1dur", 0.1, "dur"),
        ("1dur", 1.0, "dur"),
        (".5dur", 0.5, "dur"),
        ("30sec", 30, "sec"),
        ("0.25sec", 0.25, "sec"),
        (" 3 EP ", 3, "ep"),
        ("24h", 86_400, "sec"),
        ("36h", 129_600, "sec"),
        ("90m", 5_400, "sec"),
        ("1h30m", 5_400, "sec"),
        ("1d12h", 129_600, "sec"),
        ("1d 2h 3m 4s", 93_784, "sec"),
        ("5s", 5, "sec"),
    ],
)
def test_text_is_read_as_people_mean_it(text, value, unit):
    """The forms that are documented, each to its exact number."""
    time = Time(text)
    assert (time.value, type(time.value), time.unit) == (value, type(value), TimeUnit(unit))
    assert Time.from_timestring(text) == time


@pytest.mark.parametrize(
    "text",
    [
        "2.5ep", "1e-1ba", "0.5tok", "", " ", "ep", "3", "3 apples", "3epep", "3ep4ba", "h",
        "30m1h", "1.5h", "nanep", "infsec", "--1ba", "1e5", "e5ba", "9e18tok0", "1e19tok",
        "1e400dur", "1e999999999tok", "9" * 5000 + "ba", "1" * 70 + "h",
    ],
)  # fmt: skip
def test_text_that_is_no_time_is_refused(text):
    """Half an epoch is no count, and a slip of the keyboard must not hang the parser."""
    with pytest.raises(UsageError):
        Time(text)


@pytest.mark.parametrize(
    ("value", "unit"),
    [
        (2.5, "ep"),
        (float("nan"), "sec"),
        (float("inf"), "dur"),
        (10**400, "dur"),
        (True, "ba"),
        (None, "ba"),
        ([1], "ba"),
        (1, None),
        (1, "epochs"),
        ("1ep", "ep"),
    ],
)
def test_number_that_is_no_time_is_refused(value, unit):
    """At construction, where the mistake is."""
    with pytest.raises(UsageError):
        Time(value, unit)


def test_whole_floats_are_counts():
    """``1e6`` is how people write a million."""
    assert Time(1e6, "tok").value == 1_000_000
    assert type(Time(1e6, "tok").value) is int


def test_of_takes_what_users_pass():
    """A bare number has the unit that the option documents."""
    assert Time.of("10ba") == Time(10, "ba")
    assert Time.of(3) == Time(3, "ep")
    assert Time.of(3, int_unit=TimeUnit.BATCH) == Time(3, "ba")
    assert Time.of(Time(3, "ba")) == Time(3, "ba")
    for wrong in (None, True, 2.5, [1], b"1ep"):
        with pytest.raises(UsageError):
            Time.of(wrong)


def test_arithmetic_stays_in_its_unit():
    """Times, text and numbers mix as long as the unit is one."""
    assert Time(4, "ba") + "2ba" == Time(6, "ba")
    assert Time(4, "ba") + 2 == 2 + Time(4, "ba") == Time(6, "ba")
    assert Time(4, "ba") - Time(6, "ba") == -Time(2, "ba")
    assert 10 - Time(4, "ba") == Time(6, "ba")
    assert Time(4, "ba") * 3 == 3 * Time(4, "ba") == Time(12, "ba")
    assert Time(4, "ba") * 0.5 == Time(4, "ba") / 2 == Time(2, "ba")
    assert Time(7, "ba") % 3 == Time(7, "ba") % "3ba" == Time(1, "ba")
    assert Time("1h30m") + "30m" == Time("2h")


def test_decimal_factors_are_taken_as_written():
    """0.57 is 57 hundredths: in binary arithmetic 0.57 * 100 is not 57."""
    assert 0.57 * 100 != 57
    assert Time(100, "ba") * 0.57 == Time(57, "ba")
    assert Time(3, "ba") / 0.1 == Time(30, "ba")


@pytest.mark.parametrize(
    "compute",
    [
        lambda: Time(5, "ba") / 2,
        lambda: Time(5, "ba") * 0.5,
        lambda: Time(5, "ba") + 0.5,
        lambda: Time(5, "ba") - "0.5ba",
        lambda: Time("0.3dur") * Time(7, "ep"),
    ],
)
def test_lossy_operation_is_refused(compute):
    """Rounding in silence moves a checkpoint or an end of training."""
    with pytest.raises(UsageError, match="not a whole number"):
        compute()


@pytest.mark.parametrize(
    "compute",
    [
        lambda: Time(5, "ba") + Time(5, "ep"),
        lambda: Time(5, "ba") - "5ep",
        lambda: Time(5, "ba") < Time(5, "ep"),
        lambda: Time(5, "ba") >= "5ep",
        lambda: Time(5, "ba") * Time(5, "ba"),
        lambda: Time(5, "ba") / Time(5, "ep"),
        lambda: Time(5, "ba") % "5ep",
        lambda: Time(5, "ba") * float("nan"),
        lambda: Time(5, "ba") / float("inf"),
        lambda: Time(5, "ba") * True,
    ],
)
def test_operation_without_a_meaning_is_refused(compute):
    """Batches are not epochs; how many make one is not known here."""
    with pytest.raises(UsageError):
        compute()


def test_fractions_of_the_whole():
    """``dur`` scales a time, and a time over a time is a ``dur``."""
    assert Time(3, "ba") / Time(4, "ba") == Time(0.75, "dur")
    assert Time(3, "ba") / "4ba" == Time("0.75dur")
    assert Time("0.75dur") * Time(4, "ba") == Time(4, "ba") * Time("0.75dur") == Time(3, "ba")
    assert Time("0.1dur") * Time(30, "ep") == Time(3, "ep")


def test_comparison_within_one_unit():
    """Also against text and bare numbers, as triggers are written."""
    assert Time(2, "ba") < Time(10, "ba")
    assert Time(2, "ba") <= "2ba"
    assert Time(3, "ba") > 2
    assert Time("90m") >= "1h30m"
    assert [str(t) for t in sorted([Time(3, "ba"), Time(1, "ba")])] == ["1ba", "3ba"]


@pytest.mark.parametrize(
    "other", [Time(2, "ep"), "2ep", "words", "", 2.5, float("nan"), True, None, [2], b"2ba"]
)
def test_unequal_is_an_answer_and_not_an_error(other):
    """``time in some_list`` must work whatever else the list holds."""
    assert Time(2, "ba") != other
    assert (Time(2, "ba") == other) is False


def test_equal_times_are_one_key():
    """Triggers are kept in sets."""
    assert len({Time("90m"), Time("1h30m"), Time(5400, "sec"), Time(5400, "ba")}) == 2
    assert Time(2, "ba") == "2ba"
    assert Time(2, "ba") == 2


def test_time_cannot_be_changed():
    """It is shared between threads and stored in records."""
    with pytest.raises(AttributeError):
        Time(1, "ba").value = 2
    assert pickle.loads(pickle.dumps(Time("0.1dur"))) == Time("0.1dur")
    assert repr(Time("1h30m")) == "Time(5400, 'sec')"
    assert str(Time(2, "ba")) == "2ba"


COUNTS = st.sampled_from(["ep", "ba", "sp", "tok"])
WHOLE = st.integers(-(2**62), 2**62)
TIMES = st.one_of(
    st.builds(Time, WHOLE, COUNTS),
    st.builds(Time, st.floats(-1e6, 1e6), st.just("dur")),
    st.builds(Time, WHOLE | st.floats(-1e9, 1e9), st.just("sec")),
)


@given(TIMES)
def test_text_form_parses_back_to_the_same_time(time):
    """Records hold times as text."""
    again = Time(time.to_timestring())
    assert again == time
    assert type(again.value) is type(time.value)
    assert hash(again) == hash(time)


@given(st.integers(-(10**9), 10**9), st.integers(1, 10**6), COUNTS)
def test_division_is_exact_or_refused(value, divisor, unit):
    """Never a neighbour of the right answer."""
    exact = Fraction(value, divisor)
    if exact.denominator == 1:
        assert (Time(value, unit) / divisor).value == exact
    else:
        with pytest.raises(UsageError):
            Time(value, unit) / divisor


@given(st.text(max_size=80) | st.from_regex(r"[0-9_.e+-]{1,20}(ep|ba|dur|sec|h|m)", fullmatch=True))
def test_any_text_is_a_time_or_a_usage_error(text):
    """Nothing else may come out of the command line's input."""
    try:
        time = Time(text)
    except UsageError:
        return
    assert Time(str(time)) == time
