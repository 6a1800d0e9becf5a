"""Texts of help: the commands by task, and the examples of one."""

from __future__ import annotations

from autoprof.cli.commands import COMMANDS, TASKS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_NAME = 12
_INDENT = " " * (_NAME + 2)
_END = (
    "RUN is a folder, an id, the beginning of one, or latest.",
    "autoprof help COMMAND shows options and more examples, autoprof -V the version.",
    "Exit status: 0; 1 if something is not there or fails; 2 for wrong use.",
)


def text(columns: int) -> str:
    """Return the commands by task, with an example each."""
    return "\n".join(line for part in _parts() for line in _wrapped(*part, columns)) + "\n"


def examples(name: str) -> str:
    """Return the examples of a command, each below what it does."""
    shown = [f"  # {comment}\n  {example}" for example, comment in COMMANDS[name][2].items()]
    return "\n".join(["examples:", *shown])


def _parts() -> Iterator[tuple[str, str]]:
    """Yield lines, each with the indent of those that go on with it."""
    yield "autoprof profiles LLM reinforcement-learning runs from outside.", ""
    yield "", ""
    yield "usage: autoprof COMMAND [options]", ""
    for task, commands in TASKS.items():
        yield "", ""
        yield f"{task}:", ""
        for name, (_, does, shown) in commands.items():
            yield f"  {name:<{_NAME}}{does}", _INDENT
            yield f"{_INDENT}$ {next(iter(shown))}", f"{_INDENT}  "
    yield "", ""
    for line in _END:
        yield line, ""


def _wrapped(line: str, indent: str, columns: int) -> list[str]:
    if len(line) < columns or columns < 2 * _NAME:
        return [line]
    # Not for a terminal that is wide enough: it takes a while to import.
    import textwrap

    return textwrap.wrap(line, columns - 1, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
