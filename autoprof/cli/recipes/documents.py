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

    findings: list[RecipeFinding]  # What is wrong with the files, and notes.
    summaries: list[str]  # A line for each file.


class Option(Struct):
    """An option of a behaviour."""

    means: str  # What it does.
    takes: str  # Its type, in the words of TOML.
    required: bool  # Whether a hook must give it.


class KnownBehaviour(Struct):
    """A behaviour."""

    does: str  # What it does.
    options: dict[str, Option]  # Its options by name.


class Behaviours(Document):
    """`autoprof recipes --behaviours --json`."""

    behaviours: dict[str, KnownBehaviour]  # The behaviours by name.


class TriedProcess(Struct):
    """A process in which a hook fired."""

    process: str  # Its command line, or the title that Ray gave it.
    host: str  # The host.
    pid: int  # Its number.
    calls: int  # How often the hook fired in it.
    steps: list[int]  # The steps that it knew then.


class TriedHook(Struct):
    """A hook after a command."""

    name: str  # Its name in the recipe.
    place: str  # Its module and attribute.
    behaviour: str  # Its behaviour.
    # `fired`, `left alone` (by `when`, `unless`, or the names of its tables), `not called`, `not imported`, `skipped`,
    # `failed`, `installed` (it has changed a class, and wraps no function).
    state: str
    said: str  # Why it did not fire, or what failed.
    calls: int  # How often it fired, in all processes.
    left_alone: int  # How many calls were left alone.
    steps: list[int]  # The steps in which it fired, as far as the processes knew them.
    processes: list[TriedProcess]  # Where it fired.


class TriedStage(Struct):
    """A stage or span on the timeline."""

    role: str  # Who does it.
    stage: str  # Its name.
    kind: str  # Its kind, where it has one.
    times: int  # How often it was there.
    steps: list[int]  # The steps.


class Tried(Document):
    """`autoprof recipes --try RECIPE --json -- COMMAND`."""

    recipe: str  # The recipe's file.
    status: int  # The exit status of the command.
    hooks: list[TriedHook]  # The recipe's hooks.
    steps: list[int]  # The steps that have ended.
    stages: list[TriedStage]  # The stages and spans, those of other recipes too.
    errors: list[str]  # Errors of autoprof's own, those of other recipes too.
