"""The settings of a run: environment, then the TOML file, then defaults."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from autoprof import conditions, interrupts, parsing
from autoprof.conditions import WHEN_TAKES, Condition
from autoprof.options import KINDS, MemoryOptions, NpuOptions, NsysOptions, parse, takes
from autoprof.redaction import hidden, is_url, url
from autoprof.window import ITERATIONS_TAKE, MINI_BATCHES_TAKE, RANKS_TAKE, STEPS_TAKE, Ranks, Steps, parse_iterations

PREFIX = "AUTOPROF_"
CONFIG_FILE = "autoprof.toml"
TOOLS = ("torch", "npu", "nsys", "memory")
MODES = ("discrete", "continuous")
CONSECUTIVE = ("apart", "together")
# Who may read what a run leaves.
GROUP = "group"
ACCESS = ("private", GROUP)
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
REASON = "reason"
# The slowest ranks of each role, as they were found when a window was opened.
FOUND = "slowest"
# What autoprof does itself, after the recording.
MERGE = "merge-profiles"
# What one backend alone knows travels with the rest and is filtered where it is used.
CONTENTS = ("cpu", "cuda", "npu", "memory", "shapes", "stack", "module", "flops", "profile-by-stage", MERGE)


class SettingsError(ValueError):
    """A setting has a wrong value. The message is one line: which setting, what it got, what it takes."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked for, checked. Values keep the user's notation, so that `run.json` shows it."""

    steps: str = "+2"
    # What opens further windows while the run goes on.
    when: tuple[Condition, ...] = ()
    dir: str = "./autoprof_runs"
    access: str = "private"
    # Empty: each process chooses (tools.choose).
    tool: tuple[str, ...] = ()
    mode: str = "discrete"
    # Whether consecutive steps of a window share a capture, in continuous mode.
    consecutive: str = "apart"
    roles: tuple[str, ...] = ("*",)
    ranks: str = "0"
    contents: tuple[str, ...] = ()
    rollout_iterations: str = "0:100"
    mini_batches: str = "all"
    recipes: tuple[str, ...] = ()
    disable: tuple[str, ...] = ()
    max_trace_mb: float = 2048.0
    # What is left free on the disk of the run directory.
    min_free_mb: float = 1024.0
    # No more steps than these are captured.
    max_steps: int = 100
    stop_timeout_s: float = 60.0
    # Empty, "1", or where the run is copied to besides.
    collect: str = ""
    on_finish: str = ""
    log: str = "warning"
    npu: NpuOptions = NpuOptions()
    nsys: NsysOptions = NsysOptions()
    memory: MemoryOptions = MemoryOptions()
    role: dict[str, dict[str, Any]] = {}
    # Nothing that a user sets: why the window was opened, where that is not `steps`, and why these ranks of each role
    # are captured, where they are the slowest.
    reason: str = ""
    found: dict[str, str] = {}

    def for_role(self, role: str) -> Settings:
        """The settings of one role: its `[role.NAME]` table over the rest."""
        return msgspec.structs.replace(self, **self.role.get(role, {}))

    def overridden(self, values: Mapping[str, Any]) -> Settings:
        """The settings with those of a window over them, over those of every role too.

        `values` may hold besides, as `reason`, why the window was opened, and as `slowest` the ranks of each role that
        stand for those words, and why.
        """
        if not values:
            return self
        reason, found = str(values.get(REASON, "")), values.get(FOUND, {})
        values = {name: value for name, value in values.items() if name not in (REASON, FOUND)}
        tables = {
            role: {name: value for name, value in table.items() if name not in values}
            for role, table in self.role.items()
        }
        for role, (ranks, _) in found.items():
            tables[role] = {**tables.get(role, {}), "ranks": ranks}
        whys = {role: why for role, (_, why) in found.items()}
        return msgspec.structs.replace(self, role=tables, reason=reason, found=whys, **overrides(values))

    def takes_role(self, role: str) -> bool:
        """Whether `role` is captured: the last of `roles` that matches decides, `!` excludes."""
        # A list of exclusions only means everything but those.
        taken = all(pattern.startswith("!") for pattern in self.roles)
        for pattern in self.roles:
            if fnmatchcase(role, pattern.lstrip("!")):
                taken = not pattern.startswith("!")
        return taken

    @property
    def compares(self) -> bool:
        """Whether steps, ranks or replicas are compared during the run: for a condition, or for the slowest of them."""
        ranks = (self.ranks, *(str(table.get("ranks", "")) for table in self.role.values()))
        return bool(self.when) or any(Ranks.parse(text).slowest for text in ranks if text)

    def disabled(self, recipe: str, hook: str) -> bool:
        """Whether `AUTOPROF_DISABLE` leaves out the hook, named `hook` or `recipe/hook`, or its recipe."""
        names = (recipe, hook, f"{recipe}/{hook}")
        return any(fnmatchcase(name, pattern) for pattern in self.disable for name in names)

    def public(self) -> dict[str, Any]:
        """The settings as `run.json` shows them: a command may hold secrets, so it is only said to be there."""
        shown: dict[str, Any] = msgspec.to_builtins(self)
        shown["on_finish"] = "(set)" if self.on_finish else ""
        shown["collect"] = url(self.collect)
        del shown[REASON], shown["found"]
        return shown


def load(environ: Mapping[str, str], directory: Path) -> Settings:
    """Read the settings of the process that starts a run.

    Args:
        environ: The environment, `AUTOPROF_*`.
        directory: The working directory: `autoprof.toml` is looked for there, and paths are relative to it.

    Raises:
        SettingsError: One value is wrong.
    """
    values = _from_file(environ.get(PREFIX + "CONFIG", ""), directory)
    for name in _FIELDS:
        text = environ.get(PREFIX + name.upper(), "").strip()
        # No steps are the timeline alone.
        if text or (name == "steps" and PREFIX + "STEPS" in environ):
            values[name] = _checked(name, text, PREFIX + name.upper())
    values["dir"] = os.path.abspath(directory / Path(values.get("dir", Settings().dir)).expanduser())
    return Settings(**values)


def overrides(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of one window only, checked.

    Raises:
        SettingsError: One value is wrong, or no setting of a single window.
    """
    return _table(dict(values), "", WINDOW_FIELDS)


def steps(value: str, where: str = "steps") -> str:
    """Steps in the grammar of `AUTOPROF_STEPS`, checked; `where` is what they are called.

    Raises:
        SettingsError: They are not.
    """
    checked: str = _checked("steps", value, where)
    return checked


def _from_file(named: str, directory: Path) -> dict[str, Any]:
    path = directory / Path(named or CONFIG_FILE).expanduser()
    try:
        content = msgspec.toml.decode(path.read_bytes())
    except FileNotFoundError:
        if named:
            raise SettingsError(f"AUTOPROF_CONFIG: there is no file {str(path)!r}; it takes a TOML file") from None
        return {}
    except (OSError, ValueError) as error:
        interrupts.pass_on(error)
        raise SettingsError(f"{path}: it can't be read as TOML ({_one_line(error)})") from None
    roles, when = content.pop("role", {}), content.get("when")
    tables = content.pop("when") if isinstance(when, list) and any(isinstance(each, dict) for each in when) else []
    values = _table(content, f"{path}: ", _FIELDS)
    if tables:
        values["when"] = tuple(_condition(table, f"{path}: [[when]]") for table in tables)
    if not isinstance(roles, dict) or not all(isinstance(table, dict) for table in roles.values()):
        raise SettingsError(f"{path}: role: got {_short(roles)}; it takes tables named [role.NAME]")
    values["role"] = {name: _table(table, f"{path}: [role.{name}] ", _ROLE_FIELDS) for name, table in roles.items()}
    return values


def _condition(table: object, where: str) -> Condition:
    if not isinstance(table, dict):
        raise SettingsError(f"{where}: got {_short(table)}; it takes tables only, or conditions only")
    read = _table(table, f"{where} ", _CONDITION_FIELDS, _CONDITION)
    try:
        return conditions.from_table(read)
    except ValueError as error:
        interrupts.pass_on(error)
        raise SettingsError(f"{where}: got {_short(table)} ({_one_line(error)}); it takes {WHEN_TAKES}") from None


def _table(table: dict[str, Any], where: str, fields: tuple[str, ...], kind: str = "") -> dict[str, Any]:
    values = {}
    for key, value in table.items():
        name = key.replace("-", "_").lower()
        if name not in fields:
            raise SettingsError(f"{where}{_short(key)}: there is no such setting here; there are {', '.join(fields)}")
        values[name] = _checked(name, value, where + key, kind)
    return values


def _checked(name: str, value: object, where: str, kind: str = "") -> Any:
    """The value, as settings of the name take it, or fields of it in tables of this kind."""
    parse, takes = _PARSERS.get(kind + name) or _PARSERS[name]
    try:
        return parse(value)
    except ValueError as error:
        interrupts.pass_on(error)
        why = f" ({_one_line(error)})" if str(error) else ""
        raise SettingsError(f"{where}: got {hidden(_short(value))}{why}; it takes {takes}") from None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


_PARSERS: dict[str, tuple[Callable[[object], Any], str]] = {
    "steps": (parsing.grammar(Steps.parse), STEPS_TAKE + ", mixtures, and nothing for the timeline alone"),
    "when": (conditions.parse, WHEN_TAKES),
    "dir": (parsing.text, "a folder"),
    "access": (parsing.one_of(ACCESS), " or ".join(ACCESS)),
    "tool": (parsing.several_of(TOOLS), f"some of {', '.join(TOOLS)}"),
    "mode": (parsing.one_of(MODES), " or ".join(MODES)),
    "consecutive": (parsing.one_of(CONSECUTIVE), " or ".join(CONSECUTIVE)),
    "roles": (parsing.words, "patterns for roles such as actor,rollout or *,!ref"),
    "ranks": (parsing.grammar(Ranks.parse), RANKS_TAKE),
    "contents": (parsing.several_of(CONTENTS), f"some of {', '.join(CONTENTS)}"),
    "rollout_iterations": (parsing.grammar(parse_iterations), ITERATIONS_TAKE),
    "mini_batches": (parsing.grammar(parse_iterations), MINI_BATCHES_TAKE),
    "recipes": (parsing.paths, "recipe files or folders that are there"),
    "disable": (parsing.words, "patterns for recipes and hooks such as vllm,verl/update-weights or *"),
    "max_trace_mb": (parsing.positive, "a number of megabytes above 0"),
    "min_free_mb": (parsing.positive, "a number of megabytes above 0"),
    "max_steps": (parsing.count, "a number of steps above 0"),
    "stop_timeout_s": (parsing.positive, "a number of seconds above 0"),
    "collect": (parsing.switch_or(is_url), "1, 0, or a URL such as s3://bucket/folder"),
    "on_finish": (parsing.text, "a command"),
    "log": (parsing.one_of(LOG_LEVELS), f"one of {', '.join(LOG_LEVELS)}"),
} | {name: (partial(parse, kind), takes(kind)) for name, kind in KINDS.items()}
_FIELDS = tuple(_PARSERS)
WINDOW_FIELDS = ("roles", "ranks", "tool", "contents", "rollout_iterations", "mini_batches")
_CONDITION = "when."
_CONDITION_FIELDS = (*conditions.PARSERS, *WINDOW_FIELDS)
_PARSERS |= {_CONDITION + name: parser for name, parser in conditions.PARSERS.items()}
_ROLE_FIELDS = ("ranks", "contents", "rollout_iterations", "mini_batches", "max_trace_mb", "stop_timeout_s")
