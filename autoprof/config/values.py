"""Values of settings: choices, options of tools, parsers, and checks of one value or of a table.

A tool may have options in addition to the contents. They come from text such as
`AUTOPROF_NPU="level=level2,mstx=false"`, or from a table such as `[npu]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import msgspec

from autoprof.base import seam
from autoprof.base.redact import hidden, is_url
from autoprof.base.units import did_you_mean
from autoprof.config import conditions, parsers, structs
from autoprof.config.conditions import WHEN_TAKES, Condition
from autoprof.config.selection import (
    ITERATIONS_TAKE,
    MINI_BATCHES_TAKE,
    RANKS_TAKE,
    STEPS_TAKE,
    Ranks,
    Steps,
    parse_iterations,
)

PREFIX = "AUTOPROF_"
TOOLS = ("torch", "npu", "nsys", "memory")
MODES = ("discrete", "continuous")
CONSECUTIVE = ("apart", "together")
# The roles of autoprof's own recipes in display order: first the driver of the steps, then the roles that it calls.
ROLES = ("trainer", "actor", "ref", "critic", "reward", "agent_loop", "rollout")
# Values of `access`: the users that may read the files of a run.
GROUP = "group"
ACCESS = ("private", GROUP)
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
REASON = "reason"
# Key for the slowest ranks of each role at the time when a window opens.
FOUND = "slowest"
# Word in the contents that is not passed to a profiler. It makes autoprof merge the traces after the recording.
MERGE = "merge-profiles"
# All words of the contents. Each profiler ignores words that it does not know.
CONTENTS = ("cpu", "cuda", "npu", "memory", "shapes", "stack", "module", "flops", "profile-by-stage", MERGE)


@structs.complete
class NpuOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of torch_npu's profiler, by the names in its `_ExperimentalConfig` (torch_npu 2.5.1 to 2.14.0).

    Attributes:
        level: Amount of data collected from the device.
        aic_metrics: Counters of the AI cores; by default `none` at `level_none` and `level0`.
        export: Output of the analysis: text for Perfetto, databases for MindStudio Insight, or both.
        mstx: True to record ranges that frameworks mark, except ranges of communication.
        l2_cache: True to count hits of the L2 cache.
        op_attr: True to collect the attributes of operators. Requires `db` or `both` as `export`.
        analyse: True to analyse each recording right after its end, in another process. If False, run
            `autoprof analyse` later.
    """

    level: Literal["level_none", "level0", "level1", "level2"] = "level1"
    aic_metrics: Literal[
        "pipe_utilization",
        "arithmetic_utilization",
        "memory",
        "memory_l0",
        "memory_ub",
        "memory_access",
        "resource_conflict_ratio",
        "l2_cache",
        "none",
    ] = "pipe_utilization"
    export: Literal["text", "db", "both"] = "text"
    mstx: bool = True
    l2_cache: bool = False
    op_attr: bool = False
    analyse: bool = True


@structs.complete
class NsysOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of Nsight Systems.

    Attributes:
        trace: Names for `nsys profile --trace`, separated by `+`.
        sample: Value of `nsys profile --sample`; `process-tree` samples host stacks and context switches.
        python_backtrace: True to record the Python stack of CUDA calls (`--python-backtrace=cuda`).
        gpu_metrics: Devices whose hardware counters are sampled (`--gpu-metrics-devices`), separated by `+`; `all`, or
            `none`.
        executable: The `nsys` to use, by default the first on the path. With Ray, its file name must be `nsys`.
    """

    trace: str = "cuda+nvtx+osrt+cublas+cudnn"
    sample: Literal["none", "process-tree"] = "none"
    python_backtrace: bool = False
    gpu_metrics: str = "none"
    executable: str = "nsys"


@structs.complete
class MemoryOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the history of CUDA's caching allocator (torch.cuda.memory).

    Attributes:
        max_entries: Maximum number of allocations and frees. The newest entries are kept. Each entry takes a few kB.
        stacks: Stacks that each entry has: Python only, Python and C++ (`all`, slow to write), or none.
        oom: True to write a snapshot to `oom/` when CUDA runs out of memory, in any step; at most three per process.
    """

    max_entries: int = 100_000
    stacks: Literal["python", "all", "none"] = "python"
    oom: bool = False


OPTIONS: dict[str, type[msgspec.Struct]] = {"npu": NpuOptions, "nsys": NsysOptions, "memory": MemoryOptions}


class SettingsError(ValueError):
    """Wrong value of a setting. The message is one line: the setting, the value, the allowed values."""


def overrides(values: Mapping[str, Any]) -> dict[str, Any]:
    """Check and return the settings of a single window.

    Raises:
        SettingsError: A value is wrong, or a name is not a setting of a single window.
    """
    return check_table(dict(values), "", WINDOW_FIELDS)


def steps(value: str, where: str = "steps") -> str:
    """Check and return steps in the grammar of `AUTOPROF_STEPS`.

    Args:
        value: The text.
        where: Name of the setting in messages.

    Raises:
        SettingsError: The text is not in the grammar.
    """
    checked: str = check("steps", value, where)
    return checked


def check_condition(table: object, where: str) -> Condition:
    """Check a `[[when]]` table and return its condition. `where` is the name of the table in messages.

    Raises:
        SettingsError: A value is wrong.
    """
    if not isinstance(table, dict):
        raise SettingsError(f"{where}: got {short(table)}; it takes tables only, or conditions only")
    read = check_table(table, f"{where} ", CONDITION_FIELDS, _CONDITION)
    try:
        return conditions.from_table(read)
    except ValueError as error:
        seam.pass_on(error)
        raise SettingsError(f"{where}: got {short(table)} ({one_line(error)}); it takes {WHEN_TAKES}") from None


def check_table(table: dict[str, Any], where: str, fields: tuple[str, ...], kind: str = "") -> dict[str, Any]:
    """Check and return the values of a table.

    Args:
        table: The table.
        where: Prefix of the settings' names in messages.
        fields: Names of the settings that the table takes.
        kind: As in `check`.

    Raises:
        SettingsError: A name or value is wrong.
    """
    values = {}
    for key, value in table.items():
        name = key.replace("-", "_").lower()
        if name not in fields:
            nearest = did_you_mean(name, fields) or f"; there are {', '.join(fields)}"
            raise SettingsError(f"{where}{short(key)}: there is no such setting here{nearest}")
        values[name] = check(name, value, where + key, kind)
    return values


def check(name: str, value: object, where: str, kind: str = "") -> Any:
    """Check and return the value of a setting.

    Args:
        name: Name of the setting.
        value: The text of a variable, or the value in TOML.
        where: Name of the setting in messages.
        kind: Prefix of the setting's name in `PARSERS`, such as `when.` for fields of a `[[when]]` table. Empty for
            settings of the run.

    Raises:
        SettingsError: The value is wrong.
    """
    parse, takes = PARSERS.get(kind + name) or PARSERS[name]
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


def _parse_options(kind: type[msgspec.Struct], text: object) -> msgspec.Struct:
    """Return the options of a tool, from a table or from text such as `level=level2,mstx=false`.

    Raises:
        ValueError: An option is unknown or has a wrong value. The message names the option.
    """
    if isinstance(text, str):
        pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
        if unclear := [name for name, equals, _ in pairs if not equals]:
            raise ValueError(f"{unclear[0].strip()!r} is not name=value")
        text = {name.strip().lower(): value.strip() for name, _, value in pairs}
        return _convert(kind, text, strict=False)
    if not isinstance(text, dict):
        raise ValueError("")
    return _convert(kind, {str(name).lower(): value for name, value in text.items()}, strict=True)


def _options_taken(kind: type[msgspec.Struct]) -> str:
    """Return a text for messages that lists the options of a tool."""
    return "name=value, separated by commas, of " + ", ".join(kind.__struct_fields__)


def _convert(kind: type[msgspec.Struct], values: Mapping[str, object], strict: bool) -> msgspec.Struct:
    try:
        return msgspec.convert({name.replace("-", "_"): value for name, value in values.items()}, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


PARSERS: dict[str, tuple[Callable[[object], Any], str]] = {
    "steps": (parsers.grammar(Steps.parse), STEPS_TAKE + ", a mixture, or nothing for the timeline alone"),
    "when": (conditions.parse, WHEN_TAKES),
    "dir": (parsers.folder, "a folder"),
    "access": (parsers.one_of(ACCESS), " or ".join(ACCESS)),
    "tool": (parsers.several_of(TOOLS), f"some of {', '.join(TOOLS)}"),
    "mode": (parsers.one_of(MODES), " or ".join(MODES)),
    "consecutive": (parsers.one_of(CONSECUTIVE), " or ".join(CONSECUTIVE)),
    "roles": (parsers.words, "patterns for roles or kinds such as actor,rollout or *,!ref or generate"),
    "ranks": (parsers.grammar(Ranks.parse), RANKS_TAKE),
    "contents": (parsers.several_of(CONTENTS), f"some of {', '.join(CONTENTS)}"),
    "rollout_iterations": (parsers.grammar(parse_iterations), ITERATIONS_TAKE),
    "mini_batches": (parsers.grammar(parse_iterations), MINI_BATCHES_TAKE),
    "recipes": (parsers.paths, "existing recipe files or folders"),
    "disable": (parsers.words, "patterns for recipes and hooks such as vllm,verl/update-weights or *"),
    "max_trace_mb": (parsers.positive, "a number of megabytes above 0"),
    "min_free_mb": (parsers.positive, "a number of megabytes above 0"),
    "max_steps": (parsers.count, "a number of steps above 0"),
    "stop_timeout_s": (parsers.positive, "a number of seconds above 0"),
    "collect": (parsers.switch_or(is_url), "1, 0, or a URL such as s3://bucket/folder"),
    "on_finish": (parsers.text, "a command"),
    "log": (parsers.one_of(LOG_LEVELS), f"one of {', '.join(LOG_LEVELS)}"),
} | {name: (partial(_parse_options, kind), _options_taken(kind)) for name, kind in OPTIONS.items()}
FIELDS = tuple(PARSERS)
WINDOW_FIELDS = ("roles", "ranks", "tool", "contents", "rollout_iterations", "mini_batches")
_CONDITION = "when."
CONDITION_FIELDS = (*conditions.PARSERS, *WINDOW_FIELDS)
PARSERS |= {_CONDITION + name: parser for name, parser in conditions.PARSERS.items()}
ROLE_FIELDS = ("ranks", "contents", "rollout_iterations", "mini_batches", "max_trace_mb", "stop_timeout_s")


def role_place(role: str) -> int:
    """Return the place of a role in the display order. Roles of other recipes come last."""
    return ROLES.index(role) if role in ROLES else len(ROLES)
