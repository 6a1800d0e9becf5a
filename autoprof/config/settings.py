"""Settings of a run."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from autoprof.base.redact import url
from autoprof.config import structs
from autoprof.config.conditions import HANG, Condition
from autoprof.config.selection import Ranks
from autoprof.config.tool_options import MemoryOptions, NpuOptions, NsysOptions
from autoprof.config.values import FOUND, REASON, overrides


@structs.complete
class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The user's settings, checked. Values keep the user's notation, so that `run.json` shows it."""

    # Global steps to capture; empty for the timeline alone.
    steps: str = "+2"
    # Conditions that open windows during the run, and what a step that hangs is.
    when: tuple[Condition, ...] = ()
    # Parent of the run directories.
    dir: str = "./autoprof_runs"
    # Permissions of the run's files, whatever the umask: `private` is 0600 and 0700, `group` 0640 and 0750.
    access: str = "private"
    # Profilers in order of preference; each process uses the first available. `torch,memory` adds the CUDA memory
    # history, `memory` records it alone. By default `npu` in processes that use an NPU, else `torch`.
    tool: tuple[str, ...] = ()
    # `discrete`: one trace per stage. `continuous`: one per process and whole step.
    mode: str = "discrete"
    # Whether consecutive steps get a trace each (`apart`) or share one (`together`), in continuous mode.
    consecutive: str = "apart"
    # Patterns for roles: `trainer`, `actor`, `critic`, `ref`, `reward`, `rollout`. `!` excludes; the last match wins.
    # A [kind](recipes.md#kinds) such as `generate` or `update_actor` stands for the stages of that kind.
    roles: tuple[str, ...] = ("*",)
    # Global ranks. A rollout replica is captured if it owns a named rank.
    ranks: str = "0"
    # Contents of a trace; `-` and `_` are the same. Unsupported ones are left out, logged once and listed in the meta
    # file. By default the host and the devices that torch was built for.
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
    # Disk space that stays free.
    min_free_mb: float = 1024.0
    # Steps captured at most, triggers included.
    max_steps: int = 100
    # Seconds that a stop may delay the run.
    stop_timeout_s: float = 60.0
    # `1` collects the parts of all nodes at the end; a URL also copies the run there.
    collect: str = ""
    # Command to run once, after the last window, its merges and collecting. It gets `$AUTOPROF_RUN_DIR`.
    on_finish: str = ""
    # Level of autoprof's log on stderr.
    log: str = "warning"
    # Options of torch_npu.
    npu: NpuOptions = NpuOptions()
    # Options of Nsight Systems.
    nsys: NsysOptions = NsysOptions()
    # Options of the CUDA memory history.
    memory: MemoryOptions = MemoryOptions()
    # Settings of single roles: their `[role.NAME]` tables.
    role: dict[str, dict[str, Any]] = {}
    # Nothing that a user sets: why the window was opened, where that is not `steps`, and why these ranks of each role
    # are captured, where they are the slowest.
    reason: str = ""
    found: dict[str, str] = {}

    def for_role(self, role: str) -> Settings:
        """Return the settings of one role: its `[role.NAME]` table over the rest."""
        return msgspec.structs.replace(self, **self.role.get(role, {}))

    def overridden(self, values: Mapping[str, Any]) -> Settings:
        """Return the settings with those of a window over them, over those of every role too.

        `values` may also hold `reason`, the reason for the window, and `slowest`, the ranks of each role that are the
        slowest, with the evidence.
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

    def takes(self, role: str, ranks: range, kind: str = "") -> bool:
        """Return whether the window is for this role or kind of stage, and for one of these global ranks."""
        return self.takes_role(role, kind) and Ranks.parse(self.for_role(role).ranks).any_in(ranks)

    def takes_role(self, role: str, kind: str = "") -> bool:
        """Return whether a stage of `role` and `kind` is captured: the last of `roles` that matches one of the two
        decides, `!` excludes.
        """
        # A list of exclusions only means everything but those.
        taken = all(pattern.startswith("!") for pattern in self.roles)
        for pattern in self.roles:
            bare = pattern.lstrip("!")
            if fnmatchcase(role, bare) or (kind and fnmatchcase(kind, bare)):
                taken = not pattern.startswith("!")
        return taken

    @property
    def compares(self) -> bool:
        """Return whether steps, ranks or replicas are compared during the run: for a condition, or for stragglers."""
        ranks = (self.ranks, *(str(table.get("ranks", "")) for table in self.role.values()))
        conditions = any(condition.what != HANG for condition in self.when)
        return conditions or any(Ranks.parse(text).slowest for text in ranks if text)

    def disabled(self, recipe: str, hook: str) -> bool:
        """Return whether `AUTOPROF_DISABLE` leaves out the hook, named `hook` or `recipe/hook`, or its recipe."""
        names = (recipe, hook, f"{recipe}/{hook}")
        return any(fnmatchcase(name, pattern) for pattern in self.disable for name in names)

    def public(self) -> dict[str, Any]:
        """Return the settings for `run.json`: a command may hold secrets, so only its presence is shown."""
        shown: dict[str, Any] = msgspec.to_builtins(self)
        shown["on_finish"] = "(set)" if self.on_finish else ""
        shown["collect"] = url(self.collect)
        del shown[REASON], shown["found"]
        return shown
