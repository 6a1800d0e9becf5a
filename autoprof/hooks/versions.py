"""Versions of targets, and the ranges of them that recipes and hooks are for."""

from __future__ import annotations

from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version


def versions_problem(versions: Any) -> str:
    """Return what is wrong with a range of versions, or an empty text. Other types than texts are not checked."""
    try:
        SpecifierSet(versions if isinstance(versions, str) else "")
    except InvalidSpecifier:
        return f"got {versions!r}; it takes a range such as '>=0.7,<0.9'"
    return ""


def fits(version: str, versions: str) -> bool:
    """Return whether a target's version is in a recipe's range.

    Only the release part is compared: verl's git tags 0.7.0 and 0.8.0 report `0.7.0.dev` and `0.8.0.dev`.
    An unknown version fits, since probes decide.
    """
    release = _release(version)
    return not versions or release is None or SpecifierSet(versions).contains(release)


def exceeds(version: str, versions: str) -> bool:
    """Return whether a target's version is newer than the end of a range, where the hooks are untested."""
    release = _release(version)
    if release is None or fits(version, versions):
        return False
    ends = [
        Version(part.version.removesuffix(".*"))
        for part in SpecifierSet(versions)
        if part.operator in ("<", "<=", "==", "~=")
    ]
    return bool(ends) and release >= max(ends)


def _release(version: str) -> Version | None:
    """Return the release part of a version, or None if it is unknown or not of PEP 440."""
    try:
        return Version(".".join(str(part) for part in Version(version).release)) if version else None
    except InvalidVersion:
        return None
