"""Entry point of the command line.

Exit status: 0 for success, 1 if something was not found or failed, 2 for wrong usage, 130 after Ctrl-C. `autoprof run`
exits with the status of its command.
"""

from __future__ import annotations

import os
import sys

from autoprof import __version__
from autoprof.cli import console
from autoprof.cli.commands import ALIASES, COMMANDS

# Not imported from typing: that import takes longer than everything else that `autoprof --help` does.
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
        except SystemExit as end:  # argparse has printed a help text or an error
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


def _run(words: list[str]) -> int:
    first_word = words[0] if words else "help"
    if first_word in _VERSION:
        print(f"autoprof {__version__}")
        return 0
    if first_word in _HELP and not words[1:]:
        from autoprof.cli import commands

        sys.stdout.write(commands.overview(_columns()))
        return 0
    if first_word in _HELP:
        first_word, words = words[1], [words[1], "--help"]
    name = ALIASES.get(first_word, first_word)
    if name not in COMMANDS:
        return _unknown(first_word)
    # Imported here, because the overview does not need these modules.
    from autoprof.cli.arguments import Parser
    from autoprof.cli.console import complain

    parsed = Parser(name).parse_args(words[1:])
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
    """Print that `name`, the first argument of autoprof, is no command or option. Return the exit status."""
    from autoprof.base.units import did_you_mean
    from autoprof.cli.console import complain

    if name.startswith("-"):
        kind = "option"
        hint = did_you_mean(name, [*_HELP, *_VERSION]) or "; options of a command follow its name"
    else:
        kind = "command"
        hint = did_you_mean(name, [*COMMANDS, *ALIASES, "help"])
    return complain(f"unknown {kind} {name!r}{hint}; autoprof --help lists the commands", 2)


def _columns() -> int:
    """Return the width of the terminal; 80 if stdout is not a terminal."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
