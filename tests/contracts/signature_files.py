"""Files of stored signatures: one for each target, with each distinct module once and the releases that have it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from packaging.version import Version

from tests.contracts.signatures import Facts

HERE = Path(__file__).resolve().parent
_WIDTH = 118


class Variant(msgspec.Struct, forbid_unknown_fields=True):
    """One module as some releases have it.

    Attributes:
        releases: These releases, with spaces between them.
        facts: Its classes, functions and imports; None where these releases have no module of the name.
    """

    releases: str
    facts: Facts | None


class Store(msgspec.Struct, forbid_unknown_fields=True):
    """The signatures of one target.

    Attributes:
        distributions: Releases that were read from each distribution, with spaces between them.
        modules: The variants of each module. A release that none of them names did not ask for the module.
    """

    distributions: dict[str, str] = {}
    modules: dict[str, list[Variant]] = {}

    def versions(self) -> list[str]:
        """Return the stored releases, oldest first."""
        return sorted((version for text in self.distributions.values() for version in text.split()), key=Version)

    def release(self, version: str) -> dict[str, Facts | None]:
        """Return the modules of one release; None for those that it lacks."""
        return {
            name: variant.facts
            for name, variants in self.modules.items()
            for variant in variants
            if version in variant.releases.split()
        }

    def put(self, version: str, distribution: str, modules: dict[str, Facts | None]) -> None:
        """Store one release, in the place of what was stored of it."""
        self._store(self._releases() | {version: (distribution, modules)})

    def keep(self, versions: Iterable[str]) -> None:
        """Forget all releases but these."""
        self._store({version: found for version, found in self._releases().items() if version in set(versions)})

    def _releases(self) -> dict[str, tuple[str, dict[str, Facts | None]]]:
        return {
            version: (distribution, self.release(version))
            for distribution, text in self.distributions.items()
            for version in text.split()
        }

    def _store(self, releases: dict[str, tuple[str, dict[str, Facts | None]]]) -> None:
        self.distributions = {}
        variants: dict[str, dict[str, str]] = {}
        for version in sorted(releases, key=Version):
            distribution, modules = releases[version]
            _append(self.distributions, distribution, version)
            for name, facts in modules.items():
                _append(variants.setdefault(name, {}), json.dumps(facts), version)
        self.modules = {
            name: [Variant(text, json.loads(facts)) for facts, text in found.items()]
            for name, found in sorted(variants.items())
        }


def path(target: str) -> Path:
    """Return the file of a target."""
    return HERE / f"{target}.json"


def read(target: str) -> Store:
    """Read a target's file; a target without one has no releases."""
    file = path(target)
    return msgspec.json.decode(file.read_bytes(), type=Store) if file.exists() else Store()


def write(target: str, store: Store) -> None:
    """Write a target's file."""
    path(target).write_text(pretty(msgspec.to_builtins(store)) + "\n", encoding="utf-8")


def pretty(value: Any, depth: int = 0) -> str:
    """Return JSON with whatever fits on one line on one line, so that differences are read easily."""
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or len(line) + depth <= _WIDTH:
        return line
    inner = " " * (depth + 1)
    if isinstance(value, dict):
        items = [f"{inner}{json.dumps(name)}: {pretty(item, depth + 1)}" for name, item in value.items()]
    else:
        items = [inner + pretty(item, depth + 1) for item in value]
    first, last = ("{", "}") if isinstance(value, dict) else ("[", "]")
    return "\n".join([first, ",\n".join(items), " " * depth + last])


def _append(texts: dict[str, str], key: str, version: str) -> None:
    texts[key] = f"{texts[key]} {version}" if key in texts else version
