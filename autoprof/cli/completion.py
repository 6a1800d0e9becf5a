"""`autoprof completion`: prints a shell script that completes commands, options and runs."""

from __future__ import annotations

import argparse
from typing import Any, cast

from autoprof.cli.arguments import Parser
from autoprof.cli.console import complain
from autoprof.cli.main import ALIASES, COMMANDS

_HELP = "help"
_FOR_EACH_RUN = 'for each in "${AUTOPROF_DIR:-autoprof_runs}"/*/run.json'
# Shell functions that list the runs. Python would take too long to start at each press of the Tab key.
_RUNS = {
    "bash": "_autoprof_runs",
    "zsh": "_autoprof_runs",
    "fish": "(__autoprof_runs)",
    "preamble": {
        "bash": f"""\
_autoprof_runs() {{
  local each ids=latest
  {_FOR_EACH_RUN}; do [[ -f $each ]] && each=${{each%/run.json}} && ids+=" ${{each##*/}}"; done
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
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell that runs the script")


def run(parsed: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    try:
        import shtab
    except ImportError:
        return complain("completion: it needs shtab: pip install 'autoprof-rl[completion]'", 1)
    print(shtab.complete(_full_parser(shtab), parsed.shell))
    return 0


def _full_parser(shtab: Any) -> argparse.ArgumentParser:
    """Return a parser of the whole command line, with all commands and their arguments."""
    parser = argparse.ArgumentParser("autoprof")
    parser.add_argument("-V", "--version", action="store_true", help="show the version")
    # The cast is needed because typeshed accepts only a class here, although argparse takes any callable.
    commands = parser.add_subparsers(parser_class=cast(Any, _parser))
    for name, entry in COMMANDS.items():
        aliases = [alias for alias, target in ALIASES.items() if target == name]
        command = commands.add_parser(name, command=name, entry=entry, help=entry[0], aliases=aliases)
        for action in command._actions:
            if action.metavar in ("RUN", "RUN|N|RUN:N"):
                _set_completion(action, _RUNS)
            elif action.metavar == "FILE" or action.nargs == argparse.REMAINDER:
                _set_completion(action, shtab.FILE)
            elif action.dest == "dir":
                _set_completion(action, shtab.DIRECTORY)
    commands.add_parser(_HELP, help="show the options of a command").add_argument("command", choices=list(COMMANDS))
    return parser


def _parser(**options: Any) -> argparse.ArgumentParser:
    return Parser(**options) if "command" in options else argparse.ArgumentParser(**options)


def _set_completion(action: Any, function: object) -> None:
    """Set the shell function that completes an argument. shtab reads it from the attribute `complete`."""
    action.complete = function
