"""What a save has cost, of several ranks together and in words."""

from __future__ import annotations

from milepost.runs.costs import cost_text, together


def test_ranks_add_up_their_bytes_and_wait_for_the_slowest():
    """A save is over when the last rank is done, and all of them fill the disk."""
    ranks = [
        {"written_bytes": 3, "linked_bytes": 1, "write_s": 2.0},
        {"written_bytes": 4, "write_s": 1.0, "sync_s": 0.5},
    ]
    assert together(ranks) == {
        "written_bytes": 7,
        "linked_bytes": 1,
        "write_s": 2.0,
        "sync_s": 0.5,
    }
    assert together([]) == {}


def test_words_name_what_is_known_and_nothing_else():
    """Older checkpoints have fewer figures, and files of strangers have any."""
    assert cost_text({}) == ""
    assert cost_text({"blocking_s": "soon", "durable_s": None, "odd": 3, "write_s": True}) == ""
    stats = {
        "written_bytes": 3 * 2**29,
        "linked_bytes": 12 * 1024,
        "write_s": 1.0,
        "blocking_s": 0.09,
        "wait_s": 0.0,
        "stage_s": 0.08,
        "durable_s": 1.21,
    }
    assert cost_text(stats) == (
        "1.5 GiB written in 1 s (1.5 GiB/s), 12.0 KiB shared with the checkpoint before, "
        "training held up for 90 ms, copying 80 ms, safe after 1.21 s"
    )
    assert cost_text({"written_bytes": 0, "write_s": 0.0}) == "0 B written"
