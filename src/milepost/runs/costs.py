"""What a save has cost: its figures, those of several ranks together, and the same in words.

    state_bytes      the parts, as they were staged
    unchanged_bytes  of these, what was found as it was and not copied
    written_bytes    all files that were written
    linked_bytes     files that are shared with the checkpoint before

    compressed_from_bytes  compressed_to_bytes   of written_bytes, what was to be compressed
    compress_s                                   the seconds of that, added up over the threads

    capture_s  plan_s  mark_s  stage_s  wait_s     what training waits for, one after the other
    blocking_s                                     the sum of those
    write_s    sync_s                              in the background; syncing is a part of writing
    commit_s   durable_s  after_s                  known only once the manifest is written

Seconds of syncing, too, are added up over the threads that write. Not every save has every figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["cost_text", "size_text", "together"]


def together(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of a save of several ranks: all bytes, and the seconds of the slowest.

    Args:
        ranks: The figures of each rank.
    """
    found: dict[str, Any] = {}
    for one in ranks:
        for name, value in one.items():
            if name not in found:
                found[name] = value
            elif name.endswith("_bytes"):
                found[name] += value
            elif name.endswith("_s"):
                found[name] = max(found[name], value)
    return found


def size_text(num_bytes: float) -> str:
    """Return a size for people: ``1.5 MiB``."""
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    size = float(num_bytes)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if size < 1000 or unit == "TiB":
            break
    return f"{size:.1f} {unit}" if size < 100 else f"{size:.0f} {unit}"


def cost_text(stats: Mapping[str, Any]) -> str:
    """Return the figures of a save in words, those that are known.

    Args:
        stats: Figures by name. What is no figure that this version knows is left out.
    """
    known = {
        name: value
        for name, value in stats.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    texts = [_written(known)]
    for name, text in _SECONDS.items():
        if name in known and (name in _ALWAYS or known[name] >= _WORTH_S):
            texts.append(f"{text} {_seconds(known[name])}")
    return ", ".join(text for text in texts if text)


_SECONDS = {
    "blocking_s": "training held up for",
    "wait_s": "of that waiting for the save before",
    "capture_s": "collecting",
    "plan_s": "planning",
    "mark_s": "comparing ranks",
    "stage_s": "copying",
    "sync_s": "syncing",
    "commit_s": "committing",
    "durable_s": "safe after",
}
_ALWAYS = ("blocking_s", "durable_s")
_WORTH_S = 0.0005


def _written(known: Mapping[str, Any]) -> str:
    if "written_bytes" not in known:
        return ""
    num_bytes, seconds = known["written_bytes"], known.get("write_s")
    text = f"{size_text(num_bytes)} written"
    if seconds:
        text += f" in {_seconds(seconds)} ({size_text(num_bytes / seconds)}/s)"
    plain_bytes = known.get("compressed_from_bytes")
    if plain_bytes and "compressed_to_bytes" in known:
        ratio = known["compressed_to_bytes"] / plain_bytes
        text += f", compressed to {ratio:.1%} of {size_text(plain_bytes)}"
    if known.get("linked_bytes"):
        text += f", {size_text(known['linked_bytes'])} shared with the checkpoint before"
    return text


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 0.1 else f"{1000 * value:.3g} ms"
