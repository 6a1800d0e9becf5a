"""Settings of a run, checks of their values, and their sources: the environment, then the TOML file, then defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from autoprof.base import files, seam
from autoprof.base.originals import os
from autoprof.base.redact import hidden, url
from autoprof.base.units import did_you_mean
from autoprof.config import values
from autoprof.config.selection import (
    CONDITION_PARSERS,
    HANG,
    ITERATIONS_TAKE,
    MINI_BATCHES_TAKE,
    RANKS_TAKE,
    STEPS_TAKE,
    WHEN_TAKES,
    Condition,
    Ranks,
    Steps,
    condition_of,
    parse_conditions,
    parse_iterations,
)
from autoprof.config.values import (
    FOUND,
    KINDS,
    PREFIX,
    REASON,
    ROLES,
    MemoryOptions,
    NpuOptions,
    NsysOptions,
    SettingsError,
    thread_safe,
)

# Dict from the name of a setting to its parser, and to the allowed values as a text for messages.
Fields: TypeAlias = Mapping[str, tuple[Callable[[object], Any], str]]


@thread_safe
class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a run, after they were checked. Values keep the user's notation, because `run.json` shows it."""

    # Global steps to capture; empty to record only the timeline.
    steps: str = "+2"
    # Conditions that open windows during the run, and the limit after which a step counts as hanging.
    when: tuple[Condition, ...] = ()
    # Parent of the run directories.
    dir: str = "./autoprof_runs"
    # Permissions of the run's files, regardless of the umask: `private` is 0600 and 0700, `group` 0640 and 0750.
    access: str = "private"
    # Profilers in order of preference; each process uses the first available profiler. `torch,memory` also records the
    # CUDA memory history, `memory` records only that history. By default `npu` in processes that use an NPU, else
    # `torch`.
    tool: tuple[str, ...] = ()
    # `discrete`: one trace per stage. `continuous`: one trace per process and whole step.
    mode: str = "discrete"
    # Traces of consecutive steps in continuous mode: one for each step (`apart`) or one for all (`together`).
    consecutive: str = "apart"
    # Patterns for roles: `trainer`, `actor`, `critic`, `ref`, `reward`, `rollout`. `!` excludes; the last
    # pattern that matches decides.
    # A [kind](recipes.md#kinds) such as `generate` or `update_actor` stands for the stages of that kind.
    roles: tuple[str, ...] = ("*",)
    # Global ranks to capture. A rollout replica is captured if it owns one of these ranks.
    ranks: str = "0"
    # Contents of a trace; `-` and `_` are equivalent. Contents that a profiler does not support are left out, logged
    # once and listed in the meta file. By default, the host and the devices that torch was built for.
    contents: tuple[str, ...] = ()
    # Forward passes of an engine to record, counted from the start of the capture.
    rollout_iterations: str = "0:100"
    # Mini-batches of an update to record, counted from 0 in each stage. Whole steps and stages without mini-batches
    # are recorded whole.
    mini_batches: str = "all"
    # More recipe files or folders, separated by `:` or `,`.
    recipes: tuple[str, ...] = ()
    # Targets (`vllm`), recipes (`verl.sft`) or hooks (`verl/update-weights`) to leave out.
    disable: tuple[str, ...] = ()
    # Size limit of a trace before compression.
    max_trace_mb: float = 2048.0
    # Disk space that autoprof leaves free.
    min_free_mb: float = 1024.0
    # Maximum number of captured steps, including the steps of triggers.
    max_steps: int = 100
    # Maximum seconds that the run waits when a capture is stopped.
    stop_timeout_s: float = 60.0
    # `0` samples no stacks in the times of a step without a stage, so that the report can't name their cause.
    gap_stacks: bool = True
    # `1` collects the files of all nodes at the end of the run; a URL also copies the files to that URL.
    collect: str = ""
    # Command to run once, after the last window, its merge and the collection of files. The command gets
    # `$AUTOPROF_RUN_DIR`.
    on_finish: str = ""
    # Level of autoprof's log on stderr. `notice` has the warnings, and one line at the end of the run.
    log: str = "notice"
    # Options of torch_npu.
    npu: NpuOptions = NpuOptions()
    # Options of Nsight Systems.
    nsys: NsysOptions = NsysOptions()
    # Options of the CUDA memory history.
    memory: MemoryOptions = MemoryOptions()
    # Settings of single roles: their `[role.NAME]` tables.
    role: dict[str, dict[str, Any]] = {}
    # Not set by users. `reason`: the reason for the window, empty if `steps` has chosen the step. `found`: a dict from
    # role to the reason why certain ranks were chosen as the slowest ranks.
    reason: str = ""
    found: dict[str, str] = {}

    def for_role(self, role: str) -> Settings:
        """Return the settings of one role: the values in its `[role.NAME]` table replace the values of the run."""
        return msgspec.structs.replace(self, **self.role.get(role, {}))

    def overridden(self, values: Mapping[str, Any]) -> Settings:
        """Return a copy of the settings, in which the values of a window replace values of the run and of roles.

        Args:
            values: Settings of the window. There may be two more keys: `reason`, the reason for the window, and
                `slowest`, a dict from role to two texts: the slowest ranks, and the evidence for this choice.
        """
        if not values:
            return self
        reason, slowest = str(values.get(REASON, "")), values.get(FOUND, {})
        values = {name: value for name, value in values.items() if name not in (REASON, FOUND)}
        tables = {
            role: {name: value for name, value in table.items() if name not in values}
            for role, table in self.role.items()
        }
        for role, (ranks, _) in slowest.items():
            tables[role] = {**tables.get(role, {}), "ranks": ranks}
        evidence = {role: text for role, (_, text) in slowest.items()}
        return msgspec.structs.replace(self, role=tables, reason=reason, found=evidence, **overrides(values))

    def takes(self, role: str, ranks: range, kind: str = "") -> bool:
        """Return True if a stage of this role or kind is captured on one of these global ranks."""
        return self.takes_role(role, kind) and Ranks.parse(self.for_role(role).ranks).any_in(ranks)

    def takes_role(self, role: str, kind: str = "") -> bool:
        """Return True if a stage of this role and kind is captured.

        The last pattern of `roles` that matches the role or the kind decides; `!` excludes.
        """
        # If all patterns exclude, all other roles are captured.
        is_taken = all(pattern.startswith("!") for pattern in self.roles)
        for pattern in self.roles:
            name_pattern = pattern.lstrip("!")
            if fnmatchcase(role, name_pattern) or (kind and fnmatchcase(kind, name_pattern)):
                is_taken = not pattern.startswith("!")
        return is_taken

    @property
    def compares(self) -> bool:
        """True if steps, ranks or replicas are compared during the run, for a condition or to find stragglers."""
        ranks = (self.ranks, *(str(table.get("ranks", "")) for table in self.role.values()))
        compares_for_condition = any(condition.what != HANG for condition in self.when)
        return compares_for_condition or any(Ranks.parse(text).slowest for text in ranks if text)

    def disabled(self, recipe: str, hook: str) -> bool:
        """Return True if `AUTOPROF_DISABLE` matches the hook (`hook` or `recipe/hook`) or its recipe."""
        names = (recipe, hook, f"{recipe}/{hook}")
        return any(fnmatchcase(name, pattern) for pattern in self.disable for name in names)

    def public(self) -> dict[str, Any]:
        """Return the settings for `run.json`, without the command `on_finish` and the secrets in the URL `collect`."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        fields["on_finish"] = "(set)" if self.on_finish else ""
        fields["collect"] = url(self.collect)
        del fields[REASON], fields["found"]
        return fields


FIELDS: Fields = {
    "steps": (values.grammar(Steps.parse), STEPS_TAKE + ", a mixture, or nothing for the timeline alone"),
    "when": (parse_conditions, WHEN_TAKES),
    "dir": (values.folder, "a folder"),
    "access": (values.one_of(values.ACCESS), " or ".join(values.ACCESS)),
    "tool": (values.several_of(values.TOOLS), f"some of {', '.join(values.TOOLS)}"),
    "mode": (values.one_of(values.MODES), " or ".join(values.MODES)),
    "consecutive": (values.one_of(values.CONSECUTIVE), " or ".join(values.CONSECUTIVE)),
    "roles": (values.words, "patterns for roles or kinds such as actor,rollout or *,!ref or generate"),
    "ranks": (values.grammar(Ranks.parse), RANKS_TAKE),
    "contents": (values.several_of(values.CONTENTS), f"some of {', '.join(values.CONTENTS)}"),
    "rollout_iterations": (values.grammar(parse_iterations), ITERATIONS_TAKE),
    "mini_batches": (values.grammar(parse_iterations), MINI_BATCHES_TAKE),
    "recipes": (values.paths, "existing recipe files or folders"),
    "disable": (values.words, "patterns for recipes and hooks such as vllm,verl/update-weights or *"),
    "max_trace_mb": (values.positive, "a number of megabytes above 0"),
    "min_free_mb": (values.positive, "a number of megabytes above 0"),
    "max_steps": (values.count, "a number of steps above 0"),
    "stop_timeout_s": (values.positive, "a number of seconds above 0"),
    "gap_stacks": (values.switch, "1 or 0"),
    "collect": (values.switch_or_url, "1, 0, or a URL such as s3://bucket/folder"),
    "on_finish": (values.text, "a command"),
    "log": (values.one_of(values.LOG_LEVELS), f"one of {', '.join(values.LOG_LEVELS)}"),
} | {name: (partial(values.parse_options, kind), values.options_taken(kind)) for name, kind in values.OPTIONS.items()}
# Settings of a single window, of a `[[when]]` table, and of a `[role.NAME]` table.
WINDOW_FIELDS = {
    name: FIELDS[name] for name in ("roles", "ranks", "tool", "contents", "rollout_iterations", "mini_batches")
}
CONDITION_FIELDS = CONDITION_PARSERS | WINDOW_FIELDS
ROLE_FIELDS = {
    name: FIELDS[name]
    for name in ("ranks", "contents", "rollout_iterations", "mini_batches", "max_trace_mb", "stop_timeout_s")
}

CONFIG_FILE = "autoprof.toml"
# Maximum size of a settings file or a recipe. Each process of a run reads them.
MAX_BYTES = 1 << 20
# Names of variables that are not settings, without the prefix `AUTOPROF_`. autoprof sets most of these variables in one
# process for other processes of the run.
_NOT_SETTINGS = (
    "CONFIG",
    "RUN_ID",
    "RUN_INFO",
    "RUN_DIR",
    "STARTER",
    "OWN_RANK",
    "LAUNCH",
    "RECIPES_FOUND",
    "SITE",
    "NSYS_REPORT",
    "KEEP_NVTX_INJECTION",
    "TRY",
    "LOOK_MS",
)
VARIABLES = (*map(str.upper, FIELDS), *_NOT_SETTINGS)


def load(environ: Mapping[str, str], directory: Path, given: Mapping[str, object] | None = None) -> Settings:
    """Return the settings of the process that starts a run.

    Args:
        environ: The environment, with `AUTOPROF_*`.
        directory: The working directory, which may have an `autoprof.toml`. Relative paths begin there.
        given: Settings that the program passes to `autoprof.start`. They replace settings from all other sources.

    Raises:
        SettingsError: A value is wrong.
    """
    fields = _settings_from_file(environ.get(PREFIX + "CONFIG", ""), directory)
    for name in FIELDS:
        text = environ.get(PREFIX + name.upper(), "").strip()
        # An empty `AUTOPROF_STEPS` has a meaning: record only the timeline.
        if text or (name == "steps" and PREFIX + "STEPS" in environ):
            fields[name] = check(name, text, PREFIX + name.upper())
    fields |= check_table(dict(given or {}), "", FIELDS)
    fields["dir"] = _folder(fields.get("dir", Settings().dir), directory)
    return Settings(**fields)


def unknown(environ: Iterable[str]) -> list[str]:
    """Return a warning for each variable with autoprof's prefix that is no setting. It suggests the nearest setting."""
    names = sorted(name.removeprefix(PREFIX) for name in environ if name.startswith(PREFIX))
    return [
        f"{PREFIX}{name} is ignored: there is no such setting{did_you_mean(name, VARIABLES, PREFIX)}"
        for name in names
        if name not in VARIABLES
    ]


def unknown_roles(settings: Settings) -> list[str]:
    """Return a warning for each word of `roles` that is neither a role of autoprof's recipes nor a kind."""
    names = (*ROLES, *KINDS)
    known_names = (*names, *settings.role)
    words = [pattern.lstrip("!") for pattern in settings.roles]
    return [
        f"{PREFIX}ROLES: {word!r} is neither a role of autoprof's recipes nor a kind of stage"
        f"{did_you_mean(word, names)}; roles are {', '.join(ROLES)}, kinds are {', '.join(KINDS)}. "
        "It selects nothing unless a recipe or autoprof.stage of yours has it as a role"
        for word in words
        if not any(fnmatchcase(name, word) for name in known_names)
    ]


def load_one(name: str, environ: Mapping[str, str], directory: Path) -> Any:
    """Return the value of one setting, even if other settings are wrong. Ignore a settings file that can't be read.

    Raises:
        SettingsError: The value is wrong.
    """
    value, where = environ.get(PREFIX + name.upper(), "").strip(), PREFIX + name.upper()
    if not value:
        path = _file(environ.get(PREFIX + "CONFIG", ""), directory)
        with seam.suppress(OSError, ValueError, RecursionError):
            value, where = _read_toml(path).get(name, ""), f"{path}: {name}"
    checked_value = check(name, value, where) if value else getattr(Settings(), name)
    return _folder(checked_value, directory) if name == "dir" else checked_value


def _folder(path: str, directory: Path) -> str:
    return os.path.abspath(directory / os.path.expanduser(path))


def _file(named: str, directory: Path) -> Path:
    return directory / os.path.expanduser(named or CONFIG_FILE)


def _settings_from_file(named: str, directory: Path) -> dict[str, Any]:
    path = _file(named, directory)
    try:
        content = _read_toml(path)
    except FileNotFoundError as error:
        seam.pass_on(error)
        if named:
            raise SettingsError(f"AUTOPROF_CONFIG: there is no file {str(path)!r}; it takes a TOML file") from None
        return {}
    except (OSError, ValueError, RecursionError) as error:
        seam.pass_on(error)
        raise SettingsError(f"{path}: it can't be read as TOML ({one_line(error)})") from None
    roles, when = content.pop("role", {}), content.get("when")
    tables = content.pop("when") if isinstance(when, list) and any(isinstance(entry, dict) for entry in when) else []
    values = check_table(content, f"{path}: ", FIELDS)
    if tables:
        values["when"] = tuple(check_condition(table, f"{path}: [[when]]") for table in tables)
    if not isinstance(roles, dict) or not all(isinstance(table, dict) for table in roles.values()):
        raise SettingsError(f"{path}: role: got {short(roles)}; it takes tables named [role.NAME]")
    values["role"] = {name: check_table(table, f"{path}: [role.{name}] ", ROLE_FIELDS) for name, table in roles.items()}
    return values


def _read_toml(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = msgspec.toml.decode(files.read_user_file(path, MAX_BYTES))
    return content


def overrides(values: Mapping[str, Any]) -> dict[str, Any]:
    """Check and return the settings of a single window.

    Raises:
        SettingsError: A value is wrong, or a name is not a setting of a single window.
    """
    return check_table(dict(values), "", WINDOW_FIELDS)


def check_condition(table: object, where: str) -> Condition:
    """Check a `[[when]]` table and return its condition. `where` is the name of the table in messages.

    Raises:
        SettingsError: A value is wrong.
    """
    if not isinstance(table, dict):
        raise SettingsError(f"{where}: got {short(table)}; it takes tables only, or conditions only")
    fields = check_table(table, f"{where} ", CONDITION_FIELDS)
    try:
        return condition_of(fields)
    except ValueError as error:
        seam.pass_on(error)
        raise SettingsError(f"{where}: got {short(table)} ({one_line(error)}); it takes {WHEN_TAKES}") from None


def check_table(table: dict[str, Any], where: str, fields: Fields) -> dict[str, Any]:
    """Check and return the values of a table.

    Args:
        table: Values by the names of the settings.
        where: Prefix of the settings' names in messages.
        fields: Settings that the table takes.

    Raises:
        SettingsError: A name or value is wrong.
    """
    values = {}
    for key, value in table.items():
        name = key.replace("-", "_").lower()
        if name not in fields:
            nearest = did_you_mean(name, fields) or f"; there are {', '.join(fields)}"
            raise SettingsError(f"{where}{short(key)}: there is no such setting here{nearest}")
        values[name] = check(name, value, where + key, fields)
    return values


def check(name: str, value: object, where: str, fields: Fields = FIELDS) -> Any:
    """Check and return the value of a setting.

    Args:
        name: Name of the setting.
        value: The text of a variable, or the value in TOML.
        where: Name of the setting in messages.
        fields: Settings among which `name` is.

    Raises:
        SettingsError: The value is wrong.
    """
    parse, takes = fields[name]
    try:
        return parse(value)
    except ValueError as error:
        seam.pass_on(error)
        reason = f" ({one_line(error)})" if str(error) else ""
        raise SettingsError(f"{where}: got {short(value)}{reason}; it takes {takes}") from None


def short(value: object) -> str:
    """Return a value as a text of at most 80 characters for a message, without secrets.

    Secrets are removed before the text is cut, because a part of a secret may not look like a secret.
    """
    try:
        text = hidden(repr(value))
    except RecursionError as error:
        seam.pass_on(error)
        text = f"a {type(value).__name__} that is nested too deeply"
    return text if len(text) <= 80 else text[:77] + "..."


def one_line(error: Exception) -> str:
    """Return the text of an exception on one line, without secrets."""
    return hidden(" ".join(str(error).split()), 200)
