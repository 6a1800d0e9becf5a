"""`autoprof completion`: prints a script with which a shell completes commands, options and runs."""

from __future__ import annotations

import argparse
from typing import Any, cast

from autoprof.cli.arguments import Parser
from autoprof.cli.commands import ALIASES, COMMANDS
from autoprof.cli.console import complain

_HELP = "help"
_IDS = 'for each in "${AUTOPROF_DIR:-autoprof_runs}"/*/run.json'
# Shells look for the runs themselves: a start of Python would be felt at each press of the key.
_RUNS = {
    "bash": "_autoprof_runs",
    "zsh": "_autoprof_runs",
    "fish": "(__autoprof_runs)",
    "preamble": {
        "bash": f"""\
_autoprof_runs() {{
  local each ids=latest
  {_IDS}; do [[ -f $each ]] && each=${{each%/run.json}} && ids+=" ${{each##*/}}"; done
  compgen -W "$ids" -- "$1"
  compgen -d -- "$1"
}}""",
        "zsh": """\
_autoprof_runs() {
  local -a ids=(latest ${AUTOPROF_DIR:-autoprof_runs}/*/run.json(N:h:t))
  compadd -a ids
  _files -/
}""",
        "fish": """\
function __autoprof_runs
  set -l parent autoprof_runs
  test -n "$AUTOPROF_DIR"; and set parent $AUTOPROF_DIR
  echo latest
  for each in $parent/*/run.json
    basename (dirname $each)
  end
  __fish_complete_directories
end""",
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell that is to complete")


def run(parsed: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    try:
        import shtab
    except ImportError:
        return complain("completion: it needs shtab: pip install 'autoprof-rl[completion]'", 1)
    print(shtab.complete(_whole(shtab), parsed.shell))
    return 0


def _whole(shtab: Any) -> argparse.ArgumentParser:
    """Return the parser of the whole command line: all commands with their arguments."""
    parser = argparse.ArgumentParser("autoprof")
    parser.add_argument("-V", "--version", action="store_true", help="show the version")
    # A function does as well as a class, which the type of the parameter does not know.
    commands = parser.add_subparsers(parser_class=cast(Any, _parser))
    for name, (_, does, _) in COMMANDS.items():
        aliases = [alias for alias, meant in ALIASES.items() if meant == name]
        command = commands.add_parser(name, command=name, help=does, aliases=aliases)
        for action in command._actions:
            if action.metavar in ("RUN", "RUN|N|RUN:N"):
                _completed(action, _RUNS)
            elif action.metavar == "FILE" or action.nargs == argparse.REMAINDER:
                _completed(action, shtab.FILE)
            elif action.dest == "dir":
                _completed(action, shtab.DIRECTORY)
    commands.add_parser(_HELP, help="show the options of a command").add_argument("command", choices=list(COMMANDS))
    return parser


def _parser(command: str = "", **options: Any) -> argparse.ArgumentParser:
    return Parser(command, **options) if command else argparse.ArgumentParser(**options)


def _completed(action: Any, by: object) -> None:
    """Tell shtab by which function of the shell an argument is completed."""
    action.complete = by
