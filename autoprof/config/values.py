"""Vocabulary of settings: choices, roles, kinds of stages, options of tools, and parsers of single values.

A kind of stage is one word for the stages of all trainers, in addition to each trainer's own names.

A tool may have options in addition to the contents. They come from text such as
`AUTOPROF_NPU="level=level2,mstx=false"`, or from a table such as `[npu]`.

A parser takes the value of an environment variable or of TOML. It raises a ValueError for a wrong value. The message of
the ValueError is the reason, or is empty.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias, TypeVar, get_args

import msgspec

from autoprof.base import files, seam
from autoprof.base.originals import os
from autoprof.base.redact import is_url

T = TypeVar("T", bound=msgspec.Struct)

PREFIX = "AUTOPROF_"
TOOLS = ("torch", "npu", "nsys", "memory")
MODES = ("discrete", "continuous")
CONSECUTIVE = ("apart", "together")
# The roles of autoprof's own recipes in display order: first the driver of the steps, then the roles that it calls.
ROLES = ("trainer", "actor", "ref", "critic", "reward", "agent_loop", "rollout")
# Values of `access`: the users that may read the files of a run.
GROUP = "group"
ACCESS = ("private", GROUP)
LOG_LEVELS = ("debug", "info", "notice", "warning", "error", "critical")
REASON = "reason"
# Key for the slowest ranks of each role at the time when a window opens.
FOUND = "slowest"
# Word in the contents that is not passed to a profiler. It makes autoprof merge the traces after the recording.
MERGE = "merge-profiles"
# All words of the contents. Each profiler ignores words that it does not know.
CONTENTS = ("cpu", "cuda", "npu", "memory", "shapes", "stack", "module", "flops", "profile-by-stage", MERGE)

Kind: TypeAlias = Literal[
    "generate",
    "reward",
    "log_prob",
    "ref_log_prob",
    "values",
    "advantage",
    "update_actor",
    "update_critic",
    "optimizer",
    "weight_sync",
    "checkpoint",
    "validate",
    "data",
]
KINDS: tuple[str, ...] = get_args(Kind)
GENERATE: Kind = "generate"
# Names of stages and timers for each kind. The timers are timers of verl (marked_timer, 0.5 to 0.9.1).
NAMES_BY_KIND: dict[Kind, str] = {
    "generate": "gen gen_max rollout generation generate_sequences generate_async generate_samples "
    "wait_for_enough_samples",
    "reward": "compute_reward compute_rewards compute_rm_score compute_score compute_score_batch",
    "log_prob": "old_log_prob compute_log_prob compute_log_probs compute_logp logprobs",
    "ref_log_prob": "ref ref_logprobs compute_ref_log_prob compute_ref_log_probs",
    "values": "compute_values",
    "advantage": "adv advantages compute_advantage compute_advantages",
    "update_actor": "update_policy train_actor policy_training train_batch training_step train_step",
    "update_critic": "train_critic critic_training",
    "optimizer": "optimizer_step",
    "weight_sync": "update_weights sync_weights sync_rollout_weights switch_to_rollout switch_to_trainer reshard",
    "checkpoint": "save_checkpoint save",
    "validate": "testing validation evaluate evaluation eval",
    "data": "get_batch load_data data_loading",
}
_KIND_BY_NAME: dict[str, Kind] = {
    name: kind for kind, names in NAMES_BY_KIND.items() for name in (kind, *names.split())
}


def thread_safe(kind: type[T]) -> type[T]:
    """Decorator that makes msgspec build its description of a struct now, while one thread imports the module.

    Otherwise msgspec builds the description when the struct is first decoded. If the struct contains another struct or
    a literal, this runs Python code, so a second thread may decode the struct at the same time. The second thread then
    uses a half-built description, which crashes the process (msgspec 0.22, `StructInfo_Convert`).
    """
    msgspec.json.Decoder(kind)
    return kind


@thread_safe
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


@thread_safe
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


@thread_safe
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


def kind_of(name: str, of_hook: Kind | Mapping[str, Kind] | None = None) -> str:
    """Return the kind of a stage, or an empty text if it is unknown.

    Args:
        name: The stage's name.
        of_hook: The option `kind` of the stage's hook: one kind, or a dict from patterns for stage names to kinds. The
            first pattern that matches decides. If no pattern matches, the stage's name decides.
    """
    if isinstance(of_hook, str):
        return of_hook
    kinds = (kind for pattern, kind in (of_hook or {}).items() if fnmatchcase(name, pattern))
    return next(kinds, _KIND_BY_NAME.get(name, ""))


def role_place(role: str) -> int:
    """Return the place of a role in the display order. Roles of other recipes come last."""
    return ROLES.index(role) if role in ROLES else len(ROLES)


def text(value: object) -> str:
    """Return text without the whitespace around it."""
    if not isinstance(value, str) or "\0" in value:
        raise ValueError("")
    return value.strip()


# Maximum length of a name and of a path in a file system, in bytes (NAME_MAX, PATH_MAX).
MAX_NAME_BYTES, _MAX_PATH_BYTES = 255, 4000


def folder(value: object) -> str:
    """Return the path of a folder, which need not exist."""
    path = os.fsencode(text(value))
    if len(path) > _MAX_PATH_BYTES or any(len(name) > MAX_NAME_BYTES for name in path.split(os.sep.encode())):
        raise ValueError("it is too long")
    return os.fsdecode(path)


def switch_or_url(value: object) -> str:
    """Return an empty text for off, `1` for on, or a URL."""
    if isinstance(value, (bool, int)):
        value = str(int(value))
    word = text(value)
    if word.lower() in ("", "0", "false", "off", "no"):
        return ""
    if word.lower() in ("1", "true", "on", "yes"):
        return "1"
    if not is_url(word):
        raise ValueError("")
    return word


def switch(value: object) -> bool:
    """Return True for on, False for off."""
    if is_url(word := switch_or_url(value)):
        raise ValueError("")
    return word == "1"


def words(value: object) -> tuple[str, ...]:
    """Return the words of a list, or of a text in which commas separate the words."""
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, (list, tuple)) or not all(isinstance(word, str) for word in value):
        raise ValueError("")
    result = tuple(word.strip() for word in value)
    if not result or not all(result):
        raise ValueError("a name is empty")
    return result


def one_of(choices: tuple[str, ...]) -> Callable[[object], str]:
    """Return a parser for one of the words in `choices`. Upper and lower case are equal."""

    def parse(value: object) -> str:
        word = text(value).lower()
        if word not in choices:
            raise ValueError("")
        return word

    return parse


def several_of(choices: tuple[str, ...]) -> Callable[[object], tuple[str, ...]]:
    """Return a parser for one or more of the words in `choices`. Case is ignored, and repeated words are dropped."""

    def parse(value: object) -> tuple[str, ...]:
        chosen_words = tuple(word.lower().replace("_", "-") for word in words(value))
        for word in chosen_words:
            if word not in choices:
                raise ValueError(f"{word!r} is unknown")
        return tuple(dict.fromkeys(chosen_words))

    return parse


def grammar(parse: Callable[[str], object]) -> Callable[[object], str]:
    """Return a parser for text that `parse` accepts. The parser converts whole numbers and lists to text first."""

    def check(value: object) -> str:
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if isinstance(value, list):
            value = ",".join(str(item) for item in value)
        written = text(value)
        parse(written)
        return written

    return check


def positive(value: object) -> float:
    """Convert a number or a text to a number above 0 and below 1e12.

    Raises:
        ValueError: `value` is not such a number.
    """
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError("")
    try:
        number = float(value)
    except (ValueError, OverflowError) as error:
        seam.pass_on(error)
        raise ValueError("") from None
    if number >= 1e12:
        raise ValueError("it must be below 1000000000000")
    if not number > 0:
        raise ValueError("")
    if isinstance(value, str) and not re.fullmatch(r"[0-9]{1,12}(\.[0-9]{0,9})?", value):
        raise ValueError("write it in digits, such as 1024 or 0.5")
    return number


def count(value: object) -> int:
    """Convert a number or a text to a whole number above 0 and below 1e12.

    Raises:
        ValueError: `value` is not such a number.
    """
    number = positive(value)
    if number != int(number):
        raise ValueError("it must be a whole number")
    return int(number)


def paths(value: object) -> tuple[str, ...]:
    """Return the absolute paths of the files and folders in a text or a list. All of them must exist."""
    if isinstance(value, str):
        value = [part for part in re.split(f"[,{os.pathsep}]", value) if part.strip()]
    result = tuple(os.path.abspath(os.path.expanduser(path)) for path in words(value))
    for path in result:
        if not files.exists(path):
            raise ValueError(f"there is no {path}")
    return result


def parse_options(kind: type[msgspec.Struct], value: object) -> msgspec.Struct:
    """Return the options of a tool, from a table or from text such as `level=level2,mstx=false`.

    Raises:
        ValueError: An option is unknown or has a wrong value. The message names the option.
    """
    is_text = isinstance(value, str)
    if isinstance(value, str):
        pairs = [pair.partition("=") for pair in value.split(",") if pair.strip()]
        if unclear := [name for name, equals, _ in pairs if not equals]:
            raise ValueError(f"{unclear[0].strip()!r} is not name=value")
        value = {name.strip(): option.strip() for name, _, option in pairs}
    if not isinstance(value, dict):
        raise ValueError("")
    options = {str(name).lower().replace("-", "_"): option for name, option in value.items()}
    try:
        return msgspec.convert(options, kind, strict=not is_text)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


def options_taken(kind: type[msgspec.Struct]) -> str:
    """Return a text for messages that lists the options of a tool."""
    return "name=value, separated by commas, of " + ", ".join(kind.__struct_fields__)
