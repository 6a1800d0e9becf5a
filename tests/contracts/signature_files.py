"""Files of stored signatures: one for each target, which stores each distinct module once with its releases."""

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
    """Version of a module that some releases share.

    Attributes:
        releases: These releases, separated by spaces.
        facts: Classes, functions and imports of the module; None if these releases lack the module.
    """

    releases: str
    facts: Facts | None


class Store(msgspec.Struct, forbid_unknown_fields=True):
    """Signatures of one target.

    Attributes:
        distributions: Releases read from each distribution, separated by spaces.
        modules: Variants of each module. If no variant has a release, the module was not read for that release.
    """

    distributions: dict[str, str] = {}
    modules: dict[str, list[Variant]] = {}

    def versions(self) -> list[str]:
        """Return the stored releases, oldest first."""
        return sorted((version for text in self.distributions.values() for version in text.split()), key=Version)

    def release(self, version: str) -> dict[str, Facts | None]:
        """Return the modules of one release; a missing module is None."""
        return {
            name: variant.facts
            for name, variants in self.modules.items()
            for variant in variants
            if version in variant.releases.split()
        }

    def put(self, version: str, distribution: str, modules: dict[str, Facts | None]) -> None:
        """Store one release, and replace its earlier signatures."""
        self._store(self._releases() | {version: (distribution, modules)})

    def keep(self, versions: Iterable[str]) -> None:
        """Remove all releases except these."""
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
    """Return the path of a target's file."""
    return HERE / f"{target}.json"


def read(target: str) -> Store:
    """Read the file of a target; without a file, the target has no releases."""
    file = path(target)
    return msgspec.json.decode(file.read_bytes(), type=Store) if file.exists() else Store()


def write(target: str, store: Store) -> None:
    """Write the file of a target."""
    path(target).write_text(pretty(msgspec.to_builtins(store)) + "\n", encoding="utf-8")


def pretty(value: Any, depth: int = 0) -> str:
    """Return JSON in which each value that fits is on one line, so that differences are easy to read."""
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
