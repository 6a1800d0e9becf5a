"""Commands by task, their help texts and examples.

This module imports no command: help and completion need no more than this.
"""

from __future__ import annotations

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Iterator


# Of each command: its module, which has `add_arguments(parser)` and `run(parsed)`, its line in the help, and examples
# with their comments. The overview shows the first one.
TASKS: dict[str, dict[str, tuple[str, str, dict[str, str]]]] = {
    "Record": {
        "run": (
            "run",
            "run a command with autoprof on",
            {
                "autoprof run --steps 2,4 -- python train.py": "capture steps 2 and 4",
                "autoprof run --when 'step>2x' -- python train.py": "capture steps after slow ones",
                "autoprof run --ranks all --dir /data -- torchrun train.py": "capture all ranks, write below /data",
            },
        ),
        "trigger": (
            "trigger.command",
            "open a window in a run that is going on",
            {
                "autoprof trigger --steps 2 --wait": "capture the next two steps, say where their traces are",
                "autoprof trigger --contents cpu,cuda,stack": "capture the next step with Python's stacks",
                "autoprof trigger --ray auto --from 4000": "reach the run through Ray, capture step 4000",
                "autoprof trigger --off": "switch autoprof off in the run",
            },
        ),
    },
    "Look": {
        "ls": (
            "ls",
            "list runs, their steps and captures",
            {
                "autoprof ls latest": "list the captures of the last run",
                "autoprof ls": "list the runs in ./autoprof_runs",
                "autoprof ls --dir /data --json": "print what is known of the runs in /data as JSON",
            },
        ),
        "report": (
            "report",
            "say where the time of each step went",
            {
                "autoprof report latest --step 7": "show step 7 in detail",
                "autoprof report": "report on the last run",
                "autoprof report latest --against 20261120": "hold a run against another",
                "autoprof report --md - > report.md": "write Markdown",
            },
        ),
        "open": (
            "open",
            "show the report and the merged trace of a step in the browser",
            {
                "autoprof open latest --step 4": "show step 4",
                "autoprof open --no-browser": "print the links, start no browser",
            },
        ),
        "stacks": (
            "stacks.command",
            "say where each process of a run stands now",
            {
                "autoprof stacks": "show the stacks of the latest run that is going on",
                "autoprof stacks --ray auto": "ask all nodes of its Ray cluster",
                "autoprof stacks latest --native": "show functions in C, too, by py-spy",
            },
        ),
        "merge": (
            "merge",
            "make one trace of a step's, all processes on one clock",
            {
                "autoprof merge --step 4": "merge the traces of step 4 of the last run",
                "autoprof merge --step 4 --role 'actor,rollout'": "merge two roles",
                "autoprof merge vllm_profile/": "merge traces that belong to no run",
            },
        ),
    },
    "Find what is missing": {
        "doctor": (
            "doctor.command",
            "say what applies here, or why a run lacks a trace",
            {
                "autoprof doctor latest": "examine the last run",
                "autoprof doctor": "examine this environment",
            },
        ),
        "collect": (
            "collect",
            "fetch the parts of a run that its nodes have on their own disks",
            {
                "autoprof collect latest": "fetch the last run's parts from its Ray cluster",
                "autoprof collect latest --to s3://bucket/runs": "and copy the run to an object store",
            },
        ),
        "analyse": (
            "analyse",
            "have torch_npu analyse what it recorded and has not analysed yet",
            {
                "autoprof analyse latest": "analyse the recordings of the last run",
                "autoprof analyse --step 4": "analyse one step's",
            },
        ),
    },
    "Set up": {
        "recipes": (
            "recipes.command",
            "list recipes and their hooks; write, check or try a recipe file",
            {
                "autoprof recipes --check mytrainer.toml": "check a recipe of your own",
                "autoprof recipes": "list recipes, and whether they fit what is installed",
                "autoprof recipes verl": "list the hooks of verl",
                "autoprof recipes --new train.py:Trainer > train.mine.toml": "write a first recipe",
                "autoprof recipes --try train.mine.toml -- python train.py": "say which hooks fired",
            },
        ),
        "completion": (
            "completion",
            "print a completion script for bash, zsh or fish",
            {
                'eval "$(autoprof completion bash)"': "complete in this shell",
                "autoprof completion zsh > ~/.zfunc/_autoprof": "for zsh, in a folder of its fpath",
                "autoprof completion fish > ~/.config/fish/completions/autoprof.fish": "for fish",
            },
        ),
    },
}
COMMANDS = {name: command for commands in TASKS.values() for name, command in commands.items()}
ALIASES = {"analyze": "analyse"}


_NAME = 12
_INDENT = " " * (_NAME + 2)
_END = (
    "RUN is a folder, an id, the beginning of one, or latest.",
    "autoprof help COMMAND shows options and more examples, autoprof -V the version.",
    "Exit status: 0; 1 if something is not there or fails; 2 for wrong use.",
)


def overview(columns: int) -> str:
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
