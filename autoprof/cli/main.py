"""Entry point of the command line, and the table of the commands with their help texts and examples.

This module does not import the modules of the commands, because that would make the overview slow.

Exit status: 0 for success, 1 if something was not found or failed, 2 for wrong usage, 130 after Ctrl-C. `autoprof run`
exits with the status of its command.
"""

from __future__ import annotations

import sys

from autoprof import __version__
from autoprof.cli import console

# Not imported from typing: that import takes longer than everything else that `autoprof --help` does.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


# dict from task to dict from the name of a command to two values: its line in the help, and its examples, a dict from
# example to comment. The overview shows only the first example. The module of the same name in `autoprof.cli` has
# `add_arguments(parser)` and `run(parsed)`.
TASKS: dict[str, dict[str, tuple[str, dict[str, str]]]] = {
    "Record": {
        "run": (
            "run a command with autoprof on",
            {
                "autoprof run --steps 2,4 -- python train.py": "capture steps 2 and 4",
                "autoprof run --when 'step>2x' -- python train.py": "capture steps after slow ones",
                "autoprof run --ranks all --dir /data -- torchrun train.py": "capture all ranks, write below /data",
            },
        ),
        "trigger": (
            "open a window in a running run",
            {
                "autoprof trigger --steps 2 --wait": "capture the next two steps, then print their folders",
                "autoprof trigger --contents cpu,cuda,stack": "capture the next step with Python's stacks",
                "autoprof trigger --ray auto --from 4000": "reach the run through Ray, capture step 4000",
                "autoprof trigger --off": "switch autoprof off in the run",
            },
        ),
    },
    "Look": {
        "ls": (
            "list runs, their steps and captures",
            {
                "autoprof ls latest": "list the captures of the last run",
                "autoprof ls": "list the runs in ./autoprof_runs",
                "autoprof ls --dir /data --json": "print the runs in /data as JSON",
            },
        ),
        "report": (
            "report where the time of each step went",
            {
                "autoprof report latest --step 7": "show step 7 in detail",
                "autoprof report": "report on the last run",
                "autoprof report latest --against 20261120": "compare the last run with another",
                "autoprof report autoprof_runs": "show all runs of a folder beside each other",
                "autoprof report --md - > report.md": "write Markdown",
            },
        ),
        "open": (
            "show the report and the merged trace of a step in the browser",
            {
                "autoprof open latest --step 4": "show step 4",
                "autoprof open --no-browser": "print the links without starting a browser",
            },
        ),
        "stacks": (
            "show the current stacks of a run's processes",
            {
                "autoprof stacks": "show the stacks of the latest running run",
                "autoprof stacks --ray auto": "ask all nodes of its Ray cluster",
                "autoprof stacks latest --native": "also show C functions, with py-spy",
            },
        ),
        "merge": (
            "merge a step's traces into one, on a common clock",
            {
                "autoprof merge --step 4": "merge the traces of step 4 of the last run",
                "autoprof merge --step 4 --role 'actor,rollout'": "merge the traces of two roles",
                "autoprof merge vllm_profile/": "merge traces that belong to no run",
            },
        ),
    },
    "Find what is missing": {
        "doctor": (
            "check which hooks apply here, or why a run lacks a trace",
            {
                "autoprof doctor latest": "check the last run",
                "autoprof doctor": "check this environment",
            },
        ),
        "collect": (
            "fetch the parts of a run from its nodes' own disks",
            {
                "autoprof collect latest": "fetch the last run's parts from its Ray cluster",
                "autoprof collect latest --to s3://bucket/runs": "also copy the run to an object store",
            },
        ),
        "analyse": (
            "run torch_npu's analysis on recordings that are not analysed yet",
            {
                "autoprof analyse latest": "analyse the recordings of the last run",
                "autoprof analyse --step 4": "analyse the recordings of step 4",
            },
        ),
    },
    "Set up": {
        "recipes": (
            "list recipes and their hooks; write, check or try a recipe file",
            {
                "autoprof recipes --check mytrainer.toml": "check your own recipe",
                "autoprof recipes": "list recipes, and whether they fit the installed versions",
                "autoprof recipes verl": "list the hooks of verl",
                "autoprof recipes --new -o train.mine.toml -- python train.py": "measure a run, write a first recipe",
                "autoprof recipes --try train.mine.toml -- python train.py": "show which hooks fired",
            },
        ),
        "completion": (
            "print a completion script for bash, zsh or fish",
            {
                'eval "$(autoprof completion bash)"': "complete in this shell",
                "autoprof completion zsh > ~/.zfunc/_autoprof": "for zsh, in a folder on its fpath",
                "autoprof completion fish > ~/.config/fish/completions/autoprof.fish": "for fish",
            },
        ),
    },
}
COMMANDS = {name: command for commands in TASKS.values() for name, command in commands.items()}
ALIASES = {"analyze": "analyse"}


# Width of the column with the names of commands in the overview, in characters.
_NAME_WIDTH = 12
_INDENT = " " * (_NAME_WIDTH + 2)
_END = (
    "RUN is a run's folder, its id, the beginning of its id, or latest.",
    "autoprof help COMMAND shows options and examples, autoprof -V shows the version.",
    "Exit status: 0; 1 if something is missing or fails; 2 for wrong usage.",
)


def overview(columns: int) -> str:
    """Return the text of `autoprof --help`: the commands by task, each with one example.

    Lines that are longer than `columns` are wrapped.
    """
    return "\n".join(line for part in _overview_lines() for line in _wrapped(*part, columns)) + "\n"


def _overview_lines() -> Iterator[tuple[str, str]]:
    """Yield each line of the overview, and the indent of the lines into which a long line is wrapped."""
    yield "autoprof profiles LLM reinforcement-learning runs from outside.", ""
    yield "", ""
    yield "usage: autoprof COMMAND [options]", ""
    for task, commands in TASKS.items():
        yield "", ""
        yield f"{task}:", ""
        for name, (summary, command_examples) in commands.items():
            yield f"  {name:<{_NAME_WIDTH}}{summary}", _INDENT
            yield f"{_INDENT}$ {next(iter(command_examples))}", f"{_INDENT}  "
    yield "", ""
    for line in _END:
        yield line, ""


def _wrapped(line: str, indent: str, columns: int) -> list[str]:
    if len(line) < columns or columns < 2 * _NAME_WIDTH:
        return [line]
    # Imported only if a line must be wrapped, because the import is slow.
    import textwrap

    return textwrap.wrap(line, columns - 1, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


_HELP, _VERSION = ("-h", "--help", "help"), ("-V", "--version")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    real = console.replace_output()
    try:
        try:
            return _run(list(sys.argv[1:] if arguments is None else arguments))
        except SystemExit as end:  # argparse has printed a help text or an error
            return end.code if isinstance(end.code, int) else 0
        except KeyboardInterrupt:
            return 130
        except OSError as error:
            return console.complain(f"{f'{error.filename}: ' if error.filename else ''}{error.strerror or error}", 1)
        finally:
            console.restore_output(real)
    except console.OutputLost as lost:
        return console.lost_output(lost.error)


def _run(words: list[str]) -> int:
    first_word = words[0] if words else "help"
    if first_word in _VERSION:
        print(f"autoprof {__version__}")
        return 0
    if first_word in _HELP and not words[1:]:
        sys.stdout.write(overview(console.columns(sys.stdout) or 80))
        return 0
    if first_word in _HELP:
        first_word, words = words[1], [words[1], "--help"]
    name = ALIASES.get(first_word, first_word)
    if name not in COMMANDS:
        return _unknown(first_word)
    # Imported here, because the overview does not need these modules.
    from autoprof.cli.arguments import Parser

    parsed = Parser(name, COMMANDS[name]).parse_args(words[1:])
    from autoprof.config.values import SettingsError
    from autoprof.rundir.runs import NotFound

    try:
        status: int = parsed.run(parsed)
        return status
    except SettingsError as error:
        return console.complain(str(error), 2)
    except NotFound as error:
        return console.complain(str(error), 1)


def _unknown(name: str) -> int:
    """Print that `name`, the first argument of autoprof, is no command or option. Return the exit status."""
    from autoprof.base.units import did_you_mean

    if name.startswith("-"):
        kind = "option"
        hint = did_you_mean(name, [*_HELP, *_VERSION]) or "; options of a command follow its name"
    else:
        kind = "command"
        hint = did_you_mean(name, [*COMMANDS, *ALIASES, "help"])
    return console.complain(f"unknown {kind} {name!r}{hint}; autoprof --help lists the commands", 2)
