"""Samples dealt to ranks: each is used once, whatever becomes of the number of ranks."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milepost.errors import UsageError
from milepost.train import ResumableSampler

LIVES = st.lists(
    st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=4
)
"""Of each life of a run: its ranks, the batch size of each, and the steps until it is cut."""


def samplers(length, num_ranks, *, position=0, epoch=1, **options):
    made = [
        ResumableSampler(length, num_replicas=num_ranks, rank=rank, **options)
        for rank in range(num_ranks)
    ]
    for sampler in made:
        sampler.start_at(position, epoch=epoch)
    return made


def in_batches(samples, size):
    return [samples[at : at + size] for at in range(0, len(samples), size)]


def steps_of(made, *, batch_size, is_batched):
    """Return what each step of all ranks reads: step, rank, samples."""
    ranks = [list(one) if is_batched else in_batches(list(one), batch_size) for one in made]
    assert len({len(batches) for batches in ranks}) == 1  # a rank alone would wait for ever
    return list(zip(*ranks, strict=True))


@settings(max_examples=200, deadline=None)
@given(
    length=st.integers(0, 60),
    lives=LIVES,
    is_batched=st.booleans(),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
)
def test_an_epoch_cut_anywhere_uses_each_sample_once(length, lives, is_batched, drop_last, shuffle):
    """The position is the number of samples used, and what was used is a beginning of the order."""
    options = {"shuffle": shuffle, "seed": 3}
    (whole,) = samplers(length, 1, **options)
    order = list(whole)
    assert sorted(order) == list(range(length))
    position, seen, may_repeat = 0, [], 0
    for number, (num_ranks, batch_size, num_steps) in enumerate(lives):
        is_last = number + 1 == len(lives)
        size = {"batch_size": batch_size} if is_batched else {}
        made = samplers(
            length, num_ranks, position=position, drop_last=drop_last, **size, **options
        )
        left = length - position
        few = (left % (num_ranks * batch_size) if is_batched else left) % num_ranks
        is_filled_up = not is_batched or batch_size == 1 or left < num_ranks
        may_repeat = num_ranks - few if few and is_filled_up and not drop_last else 0
        steps = steps_of(made, batch_size=batch_size, is_batched=is_batched)
        used = steps if is_last else steps[:num_steps]
        for step in used:
            sizes = [len(batch) for batch in step]
            assert max(sizes) <= batch_size
            assert min(sizes) >= max(1, max(sizes) - 1)
            seen += chain.from_iterable(step)
        per_step = 1 if is_batched else batch_size
        places = {one.position_after(len(used) * per_step) for one in made}
        assert len(places) == 1
        (position,) = places
        assert set(seen) == set(order[:position])
        if len(used) < len(steps):
            assert len(seen) == position
        elif not drop_last:
            assert position == length
            break
    assert len(seen) - len(set(seen)) <= may_repeat
    if drop_last:
        num_ranks, batch_size, _ = lives[-1]
        assert length - len(set(seen)) < num_ranks * (batch_size if is_batched else 1)
        assert max(Counter(seen).values(), default=1) == 1


@settings(max_examples=100, deadline=None)
@given(
    length=st.integers(1, 50),
    num_ranks=st.integers(1, 5),
    batch_size=st.none() | st.integers(1, 4),
    drop_last=st.booleans(),
    data=st.data(),
)
def test_the_rest_of_an_epoch_is_the_same_if_nothing_changes(
    length, num_ranks, batch_size, drop_last, data
):
    """A resume that deals the rest anew must not be told from a training without one."""
    options = {"batch_size": batch_size, "drop_last": drop_last}
    straight = samplers(length, num_ranks, **options)
    count = len(straight[0])
    done = data.draw(st.integers(0, count))
    position = straight[0].position_after(done)
    resumed = samplers(length, num_ranks, position=position, **options)
    for before, after in zip(straight, resumed, strict=True):
        assert list(before)[done:] == list(after)
        after.start_at(position, num_before=done)
        assert len(after) == count


def test_the_order_is_that_of_seed_and_epoch_alone():
    """Every rank derives it by itself, so it must not depend on anything else."""

    def order(**options):
        epoch = options.pop("epoch", 0)
        sampler = ResumableSampler(8, num_replicas=1, rank=0, **options)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order() == order()
    assert order() == [5, 2, 7, 3, 0, 4, 1, 6]  # of every version, or runs cannot go on
    orders = [order(seed=seed, epoch=epoch) for seed in range(3) for epoch in range(3)]
    assert len(set(map(tuple, orders))) == 9
    assert order(shuffle=False, seed=5, epoch=5) == list(range(8))


def test_places_that_fill_up_the_last_step_are_those_from_the_beginning():
    """Without them the ranks that get nothing would leave the others waiting."""
    made = samplers(2, 5, shuffle=False)
    assert [list(one) for one in made] == [[0], [1], [0], [1], [0]]
    made = samplers(10, 4, position=8, shuffle=False, batch_size=3)
    assert [list(one) for one in made] == [[[8]], [[9]], [[0]], [[1]]]


def test_setting_the_epoch_that_it_is_in_changes_nothing():
    """A loop that tells the epoch, as for DistributedSampler, must not lose a resumed position."""
    (sampler,) = samplers(10, 1, position=4, epoch=2, shuffle=False)
    sampler.set_epoch(2)
    assert list(sampler) == [4, 5, 6, 7, 8, 9]
    sampler.set_epoch(3)
    assert list(sampler) == list(range(10))


@pytest.mark.parametrize(
    "options",
    [
        {"num_replicas": 2},
        {"rank": 0},
        {"num_replicas": 2, "rank": 2},
        {"num_replicas": 0, "rank": 0},
        {"batch_size": 0},
    ],
)
def test_numbers_that_make_no_sense_are_refused(options):
    """They would be noticed as samples that are missing, much later."""
    with pytest.raises(UsageError):
        ResumableSampler(10, **options)
    with pytest.raises(UsageError):
        ResumableSampler(10).start_at(11)


def test_workers_without_a_process_group_are_told(monkeypatch):
    """Each would take itself for the only one, and train on everything."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="process group"):
        list(ResumableSampler(4))
