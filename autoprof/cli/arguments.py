"""Parser of a command's arguments, and the arguments that several commands share."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from autoprof.base.redact import url
from autoprof.cli.console import complain
from autoprof.config import settings
from autoprof.config.values import SettingsError
from autoprof.rundir import runs
from autoprof.rundir.runs import Run


class Parser(argparse.ArgumentParser):
    """A parser for the arguments of one command. The module of the command adds the arguments."""

    def __init__(self, command: str, entry: tuple[str, dict[str, str]], **options: Any) -> None:
        """Make the parser of a command. `entry` is the entry of the command in `main.COMMANDS`."""
        summary, examples = entry
        lines = [f"  # {comment}\n  {example}" for example, comment in examples.items()]
        options |= {"description": f"{summary[0].upper()}{summary[1:]}.", "epilog": "\n".join(["examples:", *lines])}
        super().__init__(
            **{"prog": f"autoprof {command}"} | options, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self.register("type", int, _integer)
        self.command = command
        module = importlib.import_module(f"autoprof.cli.{command}")
        module.add_arguments(self)
        self.set_defaults(run=module.run)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Return the parsed arguments. Exit with status 2 if an argument is unknown."""
        parsed, unknown_arguments = self.parse_known_args(args, namespace)
        if not unknown_arguments:
            return parsed
        first_unknown = unknown_arguments[0].partition("=")[0]
        if not first_unknown.startswith("-"):
            self.error(f"unexpected argument {first_unknown!r}")
        from autoprof.base.units import did_you_mean

        self.error(f"unknown option {first_unknown}{did_you_mean(first_unknown, self._option_string_actions)}")

    def error(self, message: str) -> NoReturn:
        """Print the error in one line and exit with status 2."""
        message = message.removeprefix("argument ")
        raise SystemExit(complain(f"{self.command}: {message}; autoprof {self.command} --help shows the options", 2))


def _integer(text: str) -> int:
    """Convert a text to an integer. For other texts, raise an error with a clearer message than argparse's."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


# Help texts of the options that set a setting, by option. `autoprof run` has all these options, `autoprof trigger` only
# those for the settings of a window.
SETTINGS = {
    "steps": "steps to capture: 2,5 or 10:13 or ::50 or +2",
    "when": "conditions that open a window: step>2x,update_actor>1.5x,rank>1.3x,memory>0.9,resume:2,oom",
    "dir": "parent of the run directory",
    "access": "who may read the run: private or group",
    "tool": "profilers, in order of preference: torch, npu, nsys, memory",
    "mode": "a trace per stage (discrete) or per step (continuous)",
    "consecutive": "traces of consecutive steps in continuous mode: apart or together",
    "roles": "roles to capture, as patterns",
    "ranks": "global ranks to capture: 0,8 or 0:4 or all or slowest:2",
    "contents": "what to record: cpu,cuda,memory,shapes,stack,...",
    "rollout-iterations": "forward passes of the engine to record: start:stop or all",
    "mini-batches": "mini-batches of a stage to record: start:stop or all",
    "config": "a TOML file with settings",
    "recipes": "additional recipe files or folders",
    "disable": "recipes or hooks to leave out, as patterns",
    "collect": "1: collect the parts of all nodes at the end; a URL: also copy the run there",
    "on-finish": "a command to run after the last window",
    "log": "level of autoprof's own log",
}


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the argument RUN. `find_run` returns the run that the user names with it."""
    parser.add_argument("name", nargs="?", metavar="RUN", default="latest", help="a run, as for ls (default: latest)")


def add_loop(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the option `--loop`. `what` is the help text of the argument."""
    text = f"{what}; a run in which several trainers train has a loop for each"
    parser.add_argument("--loop", type=int, metavar="N", help=text)


def add_dir(parser: argparse.ArgumentParser) -> None:
    """Add the option `--dir`. `parent` returns the folder that the user names with it."""
    parser.add_argument("--dir", help="parent of the run directories (default: AUTOPROF_DIR, ./autoprof_runs)")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option `--json`. If the user sets it, the command prints one document to stdout, and nothing else."""
    parser.add_argument("--json", action="store_true", help="print JSON (docs/reference/json.md)")


def parent(parsed: argparse.Namespace) -> Path:
    """Return the folder that contains the runs: the value of `--dir`, or the setting `dir`."""
    return Path(parsed.dir or setting("dir"))


def setting(name: str) -> Any:
    """Return the value of one setting, for a command that needs no other setting.

    If another setting is wrong, print a warning, and still return the value.

    Raises:
        SettingsError: The value of this setting is wrong.
    """
    try:
        return getattr(settings.load(os.environ, Path.cwd()), name)
    except SettingsError as error:
        value = settings.load_one(name, os.environ, Path.cwd())
        complain(f"{error}; this command continues, but a run would not be profiled", 0)
        return value


@contextlib.contextmanager
def cluster(address: str, named_by: str) -> Iterator[Any]:
    """Connect to a Ray cluster until the `with` block ends. Print the cluster's address to stderr.

    Yields the module `ray`.

    Args:
        address: The address, as `ray.init` takes it.
        named_by: The option, variable or run that names the cluster, for the message.

    Raises:
        Unreachable: The cluster can't be reached, or there is no cluster at the address.
    """
    from autoprof.run import cluster

    with cluster.connected(address) as ray:
        verb = f"{address} found" if address == "auto" else "names"
        complain(f"connected to the Ray cluster at {cluster.own_address() or url(address)}, which {named_by} {verb}", 0)
        yield ray


def complain_about_cluster(command: str, error: Exception) -> int:
    """Print an error of the Ray cluster or of its nodes to stderr, and return the exit status."""
    from autoprof.run.cluster import Lost, Unreachable

    status = complain(f"{command}: {'--ray: ' if isinstance(error, Unreachable) else ''}{error}", 1)
    if isinstance(error, Lost):
        sys.stdout.flush()
        # Skip Ray's exit handlers: they would wait for its head, which is gone.
        os._exit(status)
    return status


def find_run(parsed: argparse.Namespace) -> Run:
    """Return the run that the argument RUN names.

    Raises:
        NotFound: No run matches, or several do.
    """
    return runs.find(parent(parsed), parsed.name)
