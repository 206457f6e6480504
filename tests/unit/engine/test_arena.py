"""The arena: memory that is got once, ahead of the first save if there is time."""

from __future__ import annotations

import resource
import threading

import pytest
import torch
from torch import nn

import milepost as mp
from milepost.engine.arena import Arena

MIB = 1024 * 1024


def faults_of_writing(arena: Arena, num_bytes: int) -> int:
    """Write to all pages; return how many of them the kernel had to get for it."""
    array = arena.array(0, num_bytes)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    array[:] = 1
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def test_what_was_prepared_is_there_before_the_first_copy():
    """First touch costs several times the copy, and the training would wait for it."""
    arena, size = Arena(), 96 * MIB
    arena.prepare(size)
    assert arena.join(60)
    generation = arena.generation
    assert not arena.reserve(size + size // 16)  # an estimate may fall short
    assert arena.generation == generation
    fresh = Arena()
    fresh._new_map(size)  # its pages were never asked for
    if faults_of_writing(fresh, size) == 0:
        pytest.skip("the kernel does not count the pages it gets")
    fresh._new_map(size)
    assert faults_of_writing(arena, size) * 10 <= faults_of_writing(fresh, size)


def test_preparing_changes_nothing_that_was_copied_already():
    """A save may come first: the thread asks for pages, and writes to none."""
    arena = Arena()
    arena.prepare(64 * MIB)
    array = arena.array(0, 64 * MIB)
    array[:] = 7
    assert arena.join(60)
    assert bool((array == 7).all())


def test_a_state_beyond_the_estimate_gets_memory_of_its_own():
    """And preparing more than once, or after a save, does nothing."""
    arena = Arena()
    arena.prepare(8 * MIB)
    assert arena.reserve(64 * MIB)
    assert arena.capacity_bytes >= 64 * MIB
    generation = arena.generation
    arena.prepare(128 * MIB)
    assert arena.generation == generation
    arena.stop()
    assert arena.join(60)


def test_a_loop_prepares_after_its_first_batch_and_the_first_save_uses_it(tmp_path):
    """By then the optimizer has what it keeps. Without an interval nothing is prepared."""
    for every, is_prepared in (("3ba", True), (None, False)):
        torch.manual_seed(0)
        model = nn.Linear(1024, 1024)
        optimizer = torch.optim.AdamW(model.parameters())
        run = mp.Checkpointer(
            tmp_path / str(every), every=every, model=model, optimizer=optimizer
        ).open()
        arena = run._writer._saver._stager.arena
        for batch in range(3):
            assert (arena.capacity_bytes > 0) == (is_prepared and batch > 0)
            optimizer.zero_grad()
            model(torch.randn(2, 1024)).sum().backward()
            optimizer.step()
            run.step()
        run.save("last", wait=True)
        assert arena.generation == 1
        run.close()
    assert not [one for one in threading.enumerate() if one.name == "milepost-arena"]
