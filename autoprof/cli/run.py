"""`autoprof run`: runs a command with autoprof on."""

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
    """Replace this process by the user's command, with autoprof on. If the command can't be run, return a status."""
    command = parsed.command[1:] if parsed.command[:1] == ["--"] else parsed.command
    if not command:
        return complain("run: no command was given; write autoprof run [options] -- COMMAND", 2)
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
    """Set variables in `environ`, so that autoprof starts in each Python process with this environment."""
    site = os.path.join(os.path.dirname(own_recipes()), "sitecustomize")
    environ[ENABLE] = "1"
    environ["AUTOPROF_SITE"] = site
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [site, environ.get("PYTHONPATH")]))


def not_run(caller: str, command: str, error: OSError) -> int:
    """Print why a command can't be run, and return the status that shells use: 127 if it is not found, else 126."""
    folders = [""] if os.sep in command else os.get_exec_path()
    paths = [path for path in (os.path.join(folder, command) for folder in folders) if os.path.lexists(path)]
    if not paths:
        reason = "there is no such file" if os.sep in command else "it is not found on the PATH"
        return complain(f"{caller}: {command}: {reason}", 127)
    reason = error.strerror or str(error)
    if isinstance(error, FileNotFoundError):
        reason = "the interpreter in its first line does not exist" if os.path.exists(paths[0]) else "a broken link"
    return complain(f"{caller}: {paths[0]}: it can't be executed: {reason}", 126)
