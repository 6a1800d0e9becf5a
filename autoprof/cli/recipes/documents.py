"""Documents that `autoprof recipes` prints with `--json`."""

from __future__ import annotations

from msgspec import Struct

from autoprof.cli.documents import Document
from autoprof.cli.recipes.catalog import Entry
from autoprof.cli.recipes.form import RecipeFinding


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
