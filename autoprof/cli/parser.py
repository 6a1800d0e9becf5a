"""Parser of one command's arguments. It says in one line what is wrong, and what was probably meant."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Any, NoReturn

from autoprof.cli import overview
from autoprof.cli.commands import COMMANDS


class Parser(argparse.ArgumentParser):
    """Parser of a command's arguments, with those that the command's module adds."""

    def __init__(self, command: str, **options: Any) -> None:
        place, does, _ = COMMANDS[command]
        options |= {"description": f"{does[0].upper()}{does[1:]}.", "epilog": overview.examples(command)}
        super().__init__(
            **{"prog": f"autoprof {command}"} | options, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self.register("type", int, _whole)
        self.command = command
        module = importlib.import_module(f"autoprof.cli.{place}")
        module.add_arguments(self)
        self.set_defaults(run=module.run)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse arguments, and exit with 2 where one is not known."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if not unknown:
            return parsed
        first = unknown[0].partition("=")[0]
        if not first.startswith("-"):
            self.error(f"it does not take {first!r}")
        from autoprof.base.similar import did_you_mean

        self.error(f"there is no option {first}{did_you_mean(first, self._option_string_actions)}")

    def error(self, message: str) -> NoReturn:
        """Exit with 2 after one line."""
        from autoprof.cli.console import complain

        message = message.removeprefix("argument ")
        raise SystemExit(complain(f"{self.command}: {message}; autoprof {self.command} --help shows the options", 2))


def _whole(text: str) -> int:
    """Return a whole number, and say in plain words where it is none."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
