"""`make contracts`: stores the signatures of the releases in `releases.toml`, and prints the changes.

Each wheel is downloaded with pip, read, and deleted; nothing is installed or run. If a release has no wheel, its source
distribution is read; pip then runs the code that computes its version. Targets that are on no index are read from
commits in a clone of their repository, given by `--clone`. Without `--clone` their stored signatures are kept.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from packaging.version import Version

from autoprof.cli.recipes_catalog import Module
from tests.contracts import signature_files, stored
from tests.contracts.signatures import Facts, Wanted, collect

_PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("releases", nargs="*", metavar="TARGET[==VERSION]", help="store only these releases")
    parser.add_argument("--new", action="store_true", help="list releases newer than the known ones, and store nothing")
    parser.add_argument("--clone", metavar="FOLDER", help="a git repository with the commits of the named target")
    arguments = parser.parse_args()
    if arguments.new:
        return _look_for_newer()
    failed = 0
    for target, version in _chosen(arguments.releases, arguments.clone):
        try:
            _refresh(target, version, arguments.clone)
        except LookupError as error:
            failed = 1
            print(f"{target} {version}: {error}", flush=True)
    return failed


def _chosen(asked: list[str], clone: str | None) -> Iterator[tuple[str, str]]:
    for target, table in stored.releases().items():
        for version in table.releases if bool(table.git) == bool(clone) else ():
            if not asked or target in asked or f"{target}=={version}" in asked:
                yield target, version


def _refresh(target: str, version: str, clone: str | None) -> None:
    """Store one release, and print the differences from its stored signatures, or from the release before."""
    distribution, after = _read_release(target, version, clone)
    store = signature_files.read(target)
    known = store.versions()
    older = [release for release in known if Version(release) < Version(version)]
    against = version if version in known else older[-1] if older else ""
    changes = list(_changes(store.release(against), after)) if against else []
    store.put(version, distribution, after)
    store.keep(stored.releases()[target].releases)
    signature_files.write(target, store)
    compared = f"compared with {against}" if against else "the first release"
    if against == version:
        compared = "compared with its stored signatures"
    print(f"{target} {version}: {compared}, {len(changes)} changes", *changes, sep="\n    ", flush=True)


def _read_release(target: str, version: str, clone: str | None) -> tuple[str, dict[str, Facts | None]]:
    """Return the distribution that contains a release, and its modules; a missing module is None."""
    table = stored.releases()[target]
    hooks = stored.hooks(target)
    wanted = Wanted(
        names=set(table.names),
        attributes=set(table.attributes),
        followed={*table.imported}.union(
            f"{hook.hook.module}.{hook.hook.attribute.partition('.')[0]}" for hook in hooks
        ),
        members={hook.hook.attribute.partition(".")[2] for hook in hooks}.union(*map(stored.attribute_options, hooks)),
    )
    modules = {*table.modules, *(hook.hook.module for hook in hooks)}
    if clone:
        commit = Version(version).local or ""
        found = collect(
            lambda name: _parse(lambda path: _show(clone, commit, path), ["", "src/"], name), modules, wanted
        )
        return "/".join(table.git.split("/")[-2:]), found
    with tempfile.TemporaryDirectory() as folder:
        distribution, file = _download(table.wheels, version, folder)
        if file.suffix == ".whl":
            with zipfile.ZipFile(file) as archive:
                # A wheel with compiled parts may have its Python files in a separate folder.
                apart = next((file.partition("/")[0] for file in archive.namelist() if ".data/purelib/" in file), "")
                folders = ["", f"{apart}/purelib/"] if apart else [""]
                return distribution, collect(lambda name: _parse(archive.read, folders, name), modules, wanted)
        with tarfile.open(file) as sources:
            top = sources.next()
            assert top is not None

            def read(path: str) -> bytes:
                found = sources.extractfile(f"{top.name.partition('/')[0]}/{path}")
                assert found is not None
                return found.read()

            return distribution, collect(lambda name: _parse(read, [""], name), modules, wanted)


def _download(distributions: list[str], version: str, folder: str) -> tuple[str, Path]:
    """Download the wheel, or else the sources, of the first distribution that has the version.

    Returns:
        The name of the distribution, and the path of the file.
    """
    for kind in (["--only-binary", ":all:"], ["--no-binary", ":all:", "--no-build-isolation"]):
        for distribution in distributions:
            what = ["--no-deps", *kind, "--ignore-requires-python", f"{distribution}=={version}"]
            command = [*_PIP, "download", "--quiet", "--no-cache-dir", "--dest", folder, *what]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode == 0:
                return distribution, next(iter([*Path(folder).glob("*.whl"), *Path(folder).glob("*.tar.gz")]))
    raise LookupError(f"pip can't download the release: {(result.stderr.strip().splitlines() or ['no output'])[-1]}")


def _show(clone: str, commit: str, path: str) -> bytes:
    """Return the content of a file in a commit."""
    git = ["git", "-C", clone]
    if subprocess.run([*git, "cat-file", "-e", f"{commit}^{{commit}}"], capture_output=True, check=False).returncode:
        raise LookupError(f"{clone} is not a git repository with commit {commit}")
    result = subprocess.run([*git, "show", f"{commit}:{path}"], capture_output=True, check=False)
    if result.returncode:
        raise KeyError(path)
    return result.stdout


def _parse(read: Callable[[str], bytes], folders: list[str], name: str) -> Module | None:
    path = name.replace(".", "/")
    for file in (f"{folder}{path}{ending}" for folder in folders for ending in (".py", "/__init__.py")):
        try:
            source = read(file)
        except KeyError:
            continue
        return Module(name, source, is_package=file.endswith("__init__.py"))
    return None


def _changes(before: dict[str, Facts | None], after: dict[str, Facts | None]) -> Iterator[str]:
    """Yield a line for each name that was added, removed, or changed."""
    old, new = (dict(_flat({name: facts for name, facts in each.items() if facts})) for each in (before, after))
    for name in sorted(old.keys() | new.keys()):
        if name not in old:
            yield f"+ {name}"
        elif name not in new:
            yield f"- {name}"
        elif old[name] != new[name]:
            yield f"~ {name}: {json.dumps(old[name])} -> {json.dumps(new[name])}"


def _flat(facts: Facts, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each function and each other fact with its full name."""
    for name, value in facts.items():
        place = path if name in ("classes", "functions", "methods") else f"{path}.{name}".lstrip(".")
        if isinstance(value, dict) and "parameters" not in value:
            yield from _flat(value, place)
        else:
            yield place, value


def _look_for_newer() -> int:
    """Ask pip for the releases of each target. Return 1 if one is newer than all known ones."""
    newer = 0
    for target, table in stored.releases().items():
        if table.git:
            continue
        known = max(map(Version, table.releases))
        there = {version for name in table.wheels for version in _published(name)}
        if not there:
            newer = 1
            print(f"{target}: pip finds no release", flush=True)
            continue
        unknown = sorted(version for version in there if version > known and not version.is_prerelease)
        newer |= bool(unknown)
        news = f"{', '.join(map(str, unknown))} is not in releases.toml" if unknown else "no newer release"
        print(f"{target}: newest known {known}; {news}", flush=True)
    return newer


def _published(distribution: str) -> Iterator[Version]:
    command = [*_PIP, "index", "versions", "--ignore-requires-python", distribution]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in result.stdout.splitlines():
        title, _, rest = line.partition(":")
        if title.strip() == "Available versions":
            yield from map(Version, rest.replace(",", " ").split())


if __name__ == "__main__":
    sys.exit(main())
