"""Documents that `autoprof recipes` prints with `--json`."""

from __future__ import annotations

from msgspec import Struct

from autoprof.cli.documents import Document
from autoprof.cli.recipes.catalog import Entry
from autoprof.cli.recipes.check import RecipeFinding


class Catalog(Document):
    """`autoprof recipes --json`, and `autoprof recipes NAME --json`."""

    recipes: list[Entry]  # The recipes.


class Checked(Document):
    """`autoprof recipes --check FILE --json`."""

    findings: list[RecipeFinding]  # Errors in the files, and notes.
    summaries: list[str]  # One line per file.


class Option(Struct):
    """An option of a behaviour."""

    means: str  # Its meaning.
    takes: str  # Its type, in the terms of TOML.
    required: bool  # True if every hook with this behaviour must set it.


class KnownBehaviour(Struct):
    """A behaviour."""

    does: str  # Its effect.
    options: dict[str, Option]  # Its options by name.


class Behaviours(Document):
    """`autoprof recipes --behaviours --json`."""

    behaviours: dict[str, KnownBehaviour]  # The behaviours by name.


class TriedProcess(Struct):
    """A process in which a hook fired."""

    process: str  # Its command line, or the title that Ray gave it.
    host: str  # The host.
    pid: int  # Its process id.
    calls: int  # The number of calls for which the hook fired in it.
    steps: list[int]  # The steps of these calls, if the process knew them.


class TriedHook(Struct):
    """The result of a hook, after the command has ended."""

    name: str  # Its name in the recipe.
    place: str  # Its module and attribute.
    behaviour: str  # Its behaviour.
    # `fired`, `left alone` (by `when`, `unless`, or the names in its tables), `not called`, `not imported`, `skipped`,
    # `failed`, `installed` (the hook changed a class and wraps no function).
    state: str
    said: str  # The reason why it did not fire, or the error.
    calls: int  # The number of calls for which it fired, in all processes.
    left_alone: int  # The number of calls that it left alone.
    steps: list[int]  # The steps in which it fired, if the processes knew them.
    processes: list[TriedProcess]  # The processes in which it fired.


class TriedStage(Struct):
    """A stage or span on the timeline."""

    role: str  # Its role.
    stage: str  # Its name.
    kind: str  # Its kind, if any.
    times: int  # The number of times that it occurred.
    steps: list[int]  # The steps in which it occurred.


class Tried(Document):
    """`autoprof recipes --try RECIPE --json -- COMMAND`."""

    recipe: str  # The recipe's file.
    status: int  # The exit status of the command.
    hooks: list[TriedHook]  # The recipe's hooks.
    steps: list[int]  # The steps that have ended.
    stages: list[TriedStage]  # The stages and spans of all recipes.
    errors: list[str]  # Errors of autoprof, also from other recipes.
