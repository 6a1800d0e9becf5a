"""The command line.

Exit status 0, 1 (what was asked for was not found or failed), 2 (wrong use); `autoprof run` has that of its command.
"""

from __future__ import annotations

import os
import sys

from autoprof import __version__
from autoprof.cli import console
from autoprof.cli.commands import ALIASES, COMMANDS

# As typing has it, which takes longer to import than the rest of a help.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_HELP, _VERSION = ("-h", "--help", "help"), ("-V", "--version")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    real = console.replace_output()
    try:
        try:
            return _run(list(sys.argv[1:] if arguments is None else arguments))
        except SystemExit as end:  # argparse has shown a help, or complained
            return end.code if isinstance(end.code, int) else 0
        except KeyboardInterrupt:
            return 130
        except OSError as error:
            from autoprof.cli.console import complain

            return complain(f"{f'{error.filename}: ' if error.filename else ''}{error.strerror or error}", 1)
        finally:
            console.restore_output(real)
    except console.OutputLost as lost:
        return console.lost_output(lost.error)


def _run(given: list[str]) -> int:
    first = given[0] if given else "help"
    if first in _VERSION:
        print(f"autoprof {__version__}")
        return 0
    if first in _HELP and not given[1:]:
        from autoprof.cli import commands

        sys.stdout.write(commands.overview(_columns()))
        return 0
    if first in _HELP:
        first, given = given[1], [given[1], "--help"]
    name = ALIASES.get(first, first)
    if name not in COMMANDS:
        return _unknown(first)
    # Not for the commands' help.
    from autoprof.cli.arguments import Parser
    from autoprof.cli.console import complain

    parsed = Parser(name).parse_args(given[1:])
    from autoprof.config.values import SettingsError
    from autoprof.rundir.runs import NotFound

    try:
        status: int = parsed.run(parsed)
        return status
    except SettingsError as error:
        return complain(str(error), 2)
    except NotFound as error:
        return complain(str(error), 1)


def _unknown(name: str) -> int:
    """Complain about what is no command."""
    from autoprof.base.similar import did_you_mean
    from autoprof.cli.console import complain

    if name.startswith("-"):
        known, what = [*_HELP, *_VERSION], "option"
        hint = did_you_mean(name, known) or "; options of a command stand behind it"
    else:
        hint, what = did_you_mean(name, [*COMMANDS, *ALIASES, "help"]), "command"
    return complain(f"there is no {what} {name!r}{hint}; autoprof --help shows what there is", 2)


def _columns() -> int:
    """Return the width of the terminal, or one for everybody where there is none."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
