"""What became of each hook in this process: `hooks/<host>-<pid>.json`."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from autoprof import documents, interrupts, log, rundir
from autoprof.documents import ProcessDocument
from autoprof.recipe import BoundHook, Recipe
from autoprof.redaction import hidden, redacted
from autoprof.rundir import RunDir

WAITING = "the module was not imported here"


class HookLog:
    """Collects outcomes and writes them as soon as a hook of a target that is not passive was applied or failed."""

    def __init__(self, directory: RunDir, join: Callable[[], None]) -> None:
        self._directory = directory
        self._join = join
        # Ray's id of the node that this process is on, once that is known.
        self.node = ""
        self._lock = threading.RLock()
        self._hooks: dict[str, dict[str, Any]] = {}
        self._versions: dict[str, str] = {}
        self._errors: dict[str, dict[str, Any]] = {}
        self._active_target = False
        self._worth_writing = False
        # The process whose file it is, and the file.
        self._file: tuple[int, Path] | None = None

    def add(self, hook: BoundHook) -> None:
        """Note a hook that waits for its module."""
        with self._lock:
            self._active_target |= not hook.recipe.passive
            self._hooks.setdefault(
                hook.key,
                {
                    "module": hook.hook.module,
                    "attribute": hook.hook.attribute,
                    "behaviour": hook.hook.behaviour,
                    "state": "skipped",
                    "reason": WAITING,
                    "called": None,
                },
            )

    def applied(self, hook: BoundHook, reason: str = "") -> None:
        self._set(hook, "applied", reason)

    def skipped(self, hook: BoundHook, reason: str) -> None:
        self._set(hook, "skipped", reason)

    def failed(self, hook: BoundHook, reason: str) -> None:
        self._set(hook, "failed", reason)

    def called(self, key: str) -> None:
        """Note that a hook fired; the first time is written down."""
        entry = self._hooks.get(key)
        if entry is not None and entry["called"] is None:
            entry["called"] = time.time()
            # The driver of a run often does no more than import the target and call ray.init.
            self._worth_writing |= self._active_target
            self._write()

    def begin_anew(self) -> None:
        """In a forked child: the hooks are applied there, too, and none has been called."""
        self._lock = threading.RLock()
        self._errors = {}
        for entry in self._hooks.values():
            entry["called"] = None

    def error(self, where: str, text: str) -> None:
        """Count an error of autoprof's own."""
        with self._lock:
            entry = self._errors.setdefault(where, {"count": 0, "last": ""})
            entry["count"] += 1
            entry["last"] = hidden(text)
            often = entry["count"]
        # What fails in each of a million calls must not write a file in each.
        if often.bit_count() == 1:
            self._write()

    def switched_off(self, key: str, reason: str) -> None:
        """Note that a hook does nothing any more."""
        with self._lock:
            if key in self._hooks:
                self._hooks[key] |= {"state": "failed", "reason": reason}
        self._write()

    def version(self, recipe: Recipe) -> str:
        """The installed version of a recipe's target, or an empty text."""
        if recipe.target not in self._versions:
            self._versions[recipe.target] = installed_version(recipe)
        return self._versions[recipe.target]

    def versions(self) -> dict[str, str]:
        """The versions of the targets that this process imported."""
        return dict(self._versions)

    def summary(self) -> dict[str, Any]:
        """What `run.json` says of all processes: hosts, versions, recipes used."""
        return summary(self._directory, self._versions)

    def _set(self, hook: BoundHook, state: str, reason: str) -> None:
        self.add(hook)
        with self._lock:
            self._hooks[hook.key] |= {"state": state, "reason": hidden(reason)}
            self._worth_writing |= state != "skipped" and not hook.recipe.passive
        self._write()

    def content(self) -> dict[str, Any]:
        """What the file of this process says."""
        with self._lock:
            return {
                "host": rundir.HOST,
                **({"node": self.node} if self.node else {}),
                "pid": os.getpid(),
                "parent": os.getppid(),
                "process": process_title(),
                "python": sys.version.split()[0],
                "versions": dict(self._versions),
                "hooks": {key: dict(hook) for key, hook in self._hooks.items()},
                "errors": {where: dict(error) for where, error in self._errors.items()},
            }

    def _write(self) -> None:
        if not self._worth_writing:
            return
        try:
            # Without the lock: it may import modules of Ray's, for which a thread that comes here may have to wait.
            self._join()
            with self._lock:
                rundir.write_json(self._own_file(), self.content())
        # Nobody else stops it: this runs where an error of ours is reported, too.
        except Exception as error:
            interrupts.pass_on(error)
            self._worth_writing = False
            log.warning_once(self._directory.unwritable(error))

    def _own_file(self) -> Path:
        """The file of this process: a new one, where an earlier process of the run had the same pid."""
        if self._file is None or self._file[0] != os.getpid():
            path = self._directory.make(self._directory.hooks) / f"{rundir.HOST}-{os.getpid()}.json"
            again = itertools.count(2)
            while os.path.lexists(path):
                path = path.with_name(f"{rundir.HOST}-{os.getpid()}.{next(again)}.json")
            self._file = os.getpid(), path
        return self._file[1]


def summary(directory: RunDir, versions: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What `run.json` says of a run's processes: hosts, versions, recipes used. What can't be read is left out.

    Args:
        directory: The run's.
        versions: Versions that are known besides.
    """
    hosts: set[str] = set()
    recipes: set[str] = set()
    found = dict(versions or {})
    for path in sorted(directory.hooks.glob("*.json")):
        process = documents.read(path, ProcessDocument)
        if not {"host", "hooks", "versions"} <= process.keys():
            continue
        hosts.add(process["host"])
        found.update(process["versions"])
        recipes |= {key.partition("/")[0] for key, hook in process["hooks"].items() if hook.get("state") == "applied"}
    return {"hosts": sorted(hosts), "versions": found, "recipes": sorted(recipes)}


def installed_version(recipe: Recipe) -> str:
    """The version of the first of a recipe's distributions that is installed, or an empty text."""
    for name in recipe.distributions or [recipe.target]:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def process_title() -> str:
    """What `ps` shows for this process: Ray sets it to the actor's class. Spawned children go by their name."""
    try:
        with open("/proc/self/cmdline", "rb") as file:
            words = file.read(4096).decode(errors="replace").split("\0")
    except OSError as error:
        interrupts.pass_on(error)
        words = sys.argv
    if "--multiprocessing-fork" in words:
        import multiprocessing

        return multiprocessing.current_process().name
    return redacted([word for word in words if word][:4]).strip("'")[:200]
