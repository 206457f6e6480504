"""Where the output of workers goes when its place fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from milepost.errors import AccessError, MissingError
from milepost.launch.output import Output


def test_full_disk_does_not_stop_the_worker(capfd):
    """It would wait for ever on a pipe that nobody reads; and people still see what it says."""
    output = Output(Path("/dev/full"), is_shown=True)
    writes_to = os.dup(output.fd)
    output.started()
    for _ in range(4):
        os.write(writes_to, b"x" * 65536)  # a pipe holds as much
    os.write(writes_to, b"\nthe end\n")
    os.close(writes_to)
    output.close()
    assert capfd.readouterr().out.endswith("\nthe end\n")


def test_log_without_a_folder_is_a_typed_error(tmp_path):
    """What happened, as a class that can be told from others."""
    with pytest.raises((MissingError, AccessError)):
        Output(tmp_path / "not/there.log", is_shown=False)
