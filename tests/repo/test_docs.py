"""Every code block of the documentation runs, or says why it does not.

In ``README.md`` and below ``docs/``, a line right above a block tells how it is treated:

    ```python                       runs in a new folder and a new namespace
    <!-- continues -->              runs in the folder and namespace of the block before it
    <!-- with s3 -->                the same, with the bucket s3://runs (gs, az) of a local server
    <!-- not run: reason -->        is not run, for the reason given
    ```console                      is not run, unless marked
    <!-- run -->                    each "$ command" runs in the folder of the block before it; what
                                    is shown below a command must be its output, with "..." for
                                    any text
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from milepost.stores import Store

from ..places import Place, apply_environment
from ..servers import Server

ROOT = Path(__file__).parents[2]
PAGES = [path for path in [ROOT / "README.md"] if path.is_file()]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
SERVERS = {"with s3": "moto", "with gs": "gcs", "with az": "azurite"}
LANGUAGES = {"python", "console", "text", "json", "toml", "yaml", "make", "mermaid"}

_FENCE = re.compile(r"(?P<indent> *)```(?P<language>\w*)[^\n]*")
_MARK = re.compile(r"<!-- (?P<word>continues|run|with \w+|not run: \S.*) -->")


@dataclass
class Block:
    """One fenced block.

    Attributes:
        line: Number of its first line, from 1.
        language: The word behind the fence.
        mark: What the comment right above it says, or nothing.
        text: The code.
    """

    line: int
    language: str
    mark: str
    text: str


@dataclass
class Story:
    """Blocks that share a folder and a namespace, in the order of the page."""

    name: str
    blocks: list[Block] = field(default_factory=list)
    server: str = ""


def blocks_of(text: str) -> list[Block]:
    """Find the fenced blocks of a page."""
    lines, blocks, number = text.splitlines(), [], 0
    while number < len(lines):
        fence = _FENCE.fullmatch(lines[number])
        if not fence:
            number += 1
            continue
        start = number + 1
        above = next((line.strip() for line in reversed(lines[:number]) if line.strip()), "")
        mark = _MARK.fullmatch(above)
        number = start
        while number < len(lines) and lines[number].strip() != "```":
            number += 1
        code = textwrap.dedent("\n".join(lines[start:number])) + "\n"
        blocks.append(Block(start + 1, fence["language"], mark["word"] if mark else "", code))
        number += 1
    return blocks


def stories_of(text: str, *, name: str) -> list[Story]:
    """Put the blocks that run into stories."""
    stories: list[Story] = []
    for block in blocks_of(text):
        if block.mark.startswith("not run"):
            continue
        if block.language == "python":
            if block.mark != "continues" or not stories:
                server = SERVERS[block.mark] if block.mark.startswith("with ") else ""
                stories.append(Story(f"{name}:{block.line}", server=server))
            stories[-1].blocks.append(block)
        elif block.language == "console" and block.mark == "run":
            if not stories:
                stories.append(Story(f"{name}:{block.line}"))
            stories[-1].blocks.append(block)
    return stories


def commands_of(text: str) -> list[tuple[str, str]]:
    """Split a console block into commands and what is shown below each."""
    commands: list[tuple[str, str]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            commands.append((line[2:], ""))
        elif commands:
            command, shown = commands[-1]
            commands[-1] = (command, f"{shown}{line}\n")
    return commands


def run_console(text: str, *, folder: Path) -> None:
    """Run the commands of a block and compare what they print with what is shown."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    check = doctest.OutputChecker().check_output
    for command, shown in commands_of(text):
        done = subprocess.run(
            ["bash", "-c", command],
            check=False,
            cwd=folder,
            env={**os.environ, "PATH": path, "COLUMNS": "100", "NO_COLOR": "1"},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}"
        if shown.strip():
            flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            assert check(shown, done.stdout, flags), f"$ {command}\n{done.stdout}"


def run_story(story: Story, *, folder: Path) -> None:
    """Run the blocks of a story, the current folder being ``folder``."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in story.blocks:
        if block.language == "console":
            run_console(block.text, folder=folder)
        else:
            source = "\n" * (block.line - 1) + block.text
            exec(compile(source, story.name, "exec"), namespace)


def empty(server: Server) -> None:
    """Remove what earlier pages have left in the bucket."""
    store: Store = server.open("")
    for entry in list(store.list()):
        store.delete(entry.key)


STORIES = [
    story
    for page in PAGES
    for story in stories_of(page.read_text(encoding="utf-8"), name=str(page.relative_to(ROOT)))
]


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_documented_code_runs(story, tmp_path, monkeypatch, request):
    """What a page shows is what a reader gets."""
    if story.server:
        server = request.getfixturevalue(story.server)
        empty(server)
        apply_environment(Place(server.url, server), monkeypatch)
    monkeypatch.chdir(tmp_path)
    run_story(story, folder=tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_name_a_known_language(page):
    """A block called ``py`` or ``sh`` would be passed over in silence."""
    wrong = {
        block.line: block.language
        for block in blocks_of(page.read_text(encoding="utf-8"))
        if block.language not in LANGUAGES
    }
    assert wrong == {}


PAGE = """
# A page
```python
x = 1
```
Then:

<!-- continues -->
```python
import pathlib
pathlib.Path("a.txt").write_text(str(x + 1))
```
<!-- run -->
```console
$ cat a.txt
2
$ echo one two; echo three
one ...
```
<!-- not run: it would never end -->
```python
while True: pass
```
```console
$ exit 1
```
1. In a list:

    ```python
    y = 2
    ```
"""


def test_stories_are_found_in_a_page(tmp_path, monkeypatch):
    """The mechanism itself, on a page whose answer is known."""
    first, second = stories_of(PAGE, name="page.md")
    assert (first.name, second.name) == ("page.md:4", "page.md:30")
    assert [block.language for block in first.blocks] == ["python", "python", "console"]
    assert second.blocks[0].text == "y = 2\n"
    monkeypatch.chdir(tmp_path)
    run_story(first, folder=tmp_path)
    assert (tmp_path / "a.txt").read_text() == "2"


@pytest.mark.parametrize("block", ["$ echo 3\n4\n", "$ exit 3\n", "$ no-such-command\n"])
def test_console_block_that_lies_is_caught(block, tmp_path):
    """Other output than shown, or a command that fails."""
    with pytest.raises(AssertionError):
        run_console(block, folder=tmp_path)


def test_python_block_that_fails_is_caught(tmp_path):
    """With the line of the page in the traceback."""
    (story,) = stories_of("```python\n1 / 0\n```\n", name="page.md")
    with pytest.raises(ZeroDivisionError) as caught:
        run_story(story, folder=tmp_path)
    assert caught.traceback[-1].lineno == 1
