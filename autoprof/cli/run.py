"""The command `autoprof run`."""

from __future__ import annotations

import argparse
import os
from collections.abc import MutableMapping
from pathlib import Path

from autoprof._boot import ENABLE, own_recipes
from autoprof.cli.arguments import SETTINGS
from autoprof.cli.console import complain
from autoprof.config import settings
from autoprof.config.values import PREFIX


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add an option for each setting, and the command to run."""
    parser.usage = "autoprof run [options] -- COMMAND"
    for option, text in SETTINGS.items():
        parser.add_argument(f"--{option}", metavar="VALUE", help=text)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command, after --")


def run(parsed: argparse.Namespace) -> int:
    """Become the command, with autoprof on. Returns only where that fails."""
    command = parsed.command[1:] if parsed.command[:1] == ["--"] else parsed.command
    if not command:
        return complain("run: there is no command; write autoprof run [options] -- COMMAND", 2)
    for option in SETTINGS:
        name = option.replace("-", "_")
        if (value := getattr(parsed, name)) is not None:
            os.environ[PREFIX + name.upper()] = value
    settings.load(os.environ, Path.cwd())
    switch_on(os.environ)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        return not_run("run", command[0], error)


def switch_on(environ: MutableMapping[str, str]) -> None:
    """Set what makes autoprof start in the processes of an environment."""
    site = os.path.join(os.path.dirname(own_recipes()), "sitecustomize")
    environ[ENABLE] = "1"
    environ["AUTOPROF_SITE"] = site
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [site, environ.get("PYTHONPATH")]))


def not_run(whose: str, command: str, error: OSError) -> int:
    """Say why a command can't be run, and return the status that shells give: 127 if it is not there, else 126."""
    places = [""] if os.sep in command else os.get_exec_path()
    found = [path for path in (os.path.join(place, command) for place in places) if os.path.lexists(path)]
    if not found:
        where = "there is no such file" if os.sep in command else "it is not found on the PATH"
        return complain(f"{whose}: {command}: {where}", 127)
    why = error.strerror
    if isinstance(error, FileNotFoundError):
        why = "the interpreter that its first line names is not there" if os.path.exists(found[0]) else "a broken link"
    return complain(f"{whose}: {found[0]}: it can't be executed: {why}", 126)
