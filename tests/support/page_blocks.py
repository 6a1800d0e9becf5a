"""Code blocks of the documentation, and the commands in them.

A comment in the line above a block changes how it is treated:

    <!-- needs: verl -->           the block is checked but not run: it needs verl, a cluster or similar
    <!-- until: Ctrl-C ends it --> the command is interrupted once it has printed this text
    <!-- status: 1 -->             the expected exit status of the block's last command

If the first line of a page is `<!-- runs in: examples/own_trainer -->`, its other `console` blocks are run one after
another in a copy of that folder. A block with `title="FILE"` is written to that file. Instead of a folder,
`a made run, slow_rank=7` names a run of `report_runs` with these causes planted.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.helpers import ROOT

PAGES = [
    ROOT / "README.md",
    *(ROOT / "docs" / name for name in ("index.md", "tutorial.md", "status.md")),
    *sorted((ROOT / "docs" / "guides").glob("*.md")),
]
_FENCE = re.compile(r"^( *)```(\w*)(.*)$")
_MARK = re.compile(r"^ *<!-- (needs|until|status): (.*) -->$")
_RUNS = re.compile(r"\A<!-- runs in: (.+) -->")
_TITLE = re.compile(r'title="([^"]+)"')
# Shell operators that separate the commands of a line.
_OPERATORS = {";", "&", "&&", "|", "||", "(", ")", ">", "<", ">>"}


@dataclass(frozen=True)
class Command:
    """Command of a `console` block.

    Attributes:
        text: The command line.
        output: Lines of output that the page shows.
        first: Index of the first output line in the page, from 0.
    """

    text: str
    output: list[str]
    first: int


@dataclass(frozen=True)
class Block:
    """Fenced block of a page; `line` is the index of its first line, from 0."""

    page: Path
    kind: str
    title: str
    lines: list[str]
    line: int
    indent: str
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Content of the block without indentation."""
        return textwrap.dedent("".join(f"{line}\n" for line in self.lines))

    @property
    def place(self) -> str:
        """Page and line of the block, for messages."""
        return f"{self.page.relative_to(ROOT)}:{self.line + 1}"

    def commands(self) -> list[Command]:
        """Return the commands of a `console` block, each with its output."""
        found: list[Command] = []
        continues = False
        for number, line in enumerate(self.text.splitlines(), self.line):
            if line.startswith("$ "):
                found.append(Command(line[2:], [], number + 1))
            elif not found:
                raise AssertionError(f"{self.place}: output before the first command")
            elif continues:
                found[-1] = Command(f"{found[-1].text}\n{line}", [], number + 1)
            else:
                found[-1].output.append(line)
            continues = line.endswith("\\") and not found[-1].output
        return found


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page."""
    found: list[Block] = []
    opened: re.Match[str] | None = None
    marks: dict[str, str] = {}
    begin = 0
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        fence = _FENCE.match(line)
        if opened is None and fence:
            opened, begin, marks = fence, number + 1, {}
            above = number - 1
            while above >= 0 and (mark := _MARK.match(lines[above])):
                marks[mark[1]] = mark[2]
                above -= 1
        elif opened is not None and line.strip() == "```":
            title = _TITLE.search(opened[3])
            kind, indent = opened[2], opened[1]
            found.append(Block(page, kind, title[1] if title else "", lines[begin:number], begin, indent, marks))
            opened = None
    assert opened is None, f"{page}: a block is not closed"
    return found


def runs_in(page: Path) -> str:
    """Return the folder in which the page's commands are run, or an empty text if they are not run."""
    found = _RUNS.match(page.read_text(encoding="utf-8"))
    return found[1] if found else ""


def command_lines(block: Block) -> list[str]:
    """Return the shell lines of a block, with continued lines joined."""
    if block.kind == "console":
        text = "\n".join(command.text for command in block.commands())
    else:
        text = block.text if block.kind == "sh" else ""
    return text.replace("\\\n", " ").splitlines()


def in_prose(page: Path) -> list[str]:
    """Return the inline code of a page."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`]+)`", text)


def words(line: str) -> list[str]:
    """Split a shell line into words and operators. Return an empty list if quotes are not closed."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.wordchars += ",:@%+{}$![]#"
    lexer.commenters = ""
    try:
        found = list(lexer)
    except ValueError:
        return []
    return found[: next((place for place, word in enumerate(found) if word.startswith("#")), None)]


def autoprof_commands(line: str) -> Iterator[list[str]]:
    """Yield the arguments of each `autoprof` command in a shell line."""
    rest = words(line)
    while "autoprof" in rest:
        rest = rest[rest.index("autoprof") + 1 :]
        end = next((place for place, word in enumerate(rest) if word in _OPERATORS), len(rest))
        yield rest[:end]
        rest = rest[end:]


def assignments(line: str) -> Iterator[tuple[str, str]]:
    """Yield name and value of each autoprof variable that a shell line sets."""
    for word in words(line):
        if found := re.fullmatch(r"(AUTOPROF(?:_[A-Z_]+)?)=(.*)", word):
            yield found[1], found[2]
