"""torch_npu's profiler as a tool, with the options of `AUTOPROF_NPU`."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autoprof.base import log, process, seam
from autoprof.base.originals import os
from autoprof.capture.profilers import accepted, foreign
from autoprof.capture.profilers.torch import DEVICES, FLAGS, KinetoTool
from autoprof.config.settings import Settings
from autoprof.config.values import NpuOptions
from autoprof.rundir import file_names

_METRICS = {
    "pipe_utilization": "PipeUtilization",
    "arithmetic_utilization": "ArithmeticUtilization",
    "memory": "Memory",
    "memory_l0": "MemoryL0",
    "memory_ub": "MemoryUB",
    "memory_access": "MemoryAccess",
    "resource_conflict_ratio": "ResourceConflictRatio",
    "l2_cache": "L2Cache",
    "none": "AiCoreNone",
}
_EXPORTS = {"text": ("Text",), "db": ("Db",), "both": ("Text", "Db")}
# Levels at which torch_npu uses the counters of AI cores (experimental_config.py, _check_params).
_COUNTING_LEVELS = ("level1", "level2")


def experimental_config(profiler: Any, options: NpuOptions) -> tuple[Any, list[str]]:
    """Return torch_npu's `_ExperimentalConfig` for these options.

    autoprof passes every argument that the installed torch_npu supports, because the defaults changed in torch_npu
    2.13.

    Args:
        profiler: The module `torch_npu.profiler`.
        options: The options of `AUTOPROF_NPU`.

    Returns:
        The config, and the names of the requested options that the installed torch_npu does not support.
    """
    kind = profiler._ExperimentalConfig
    parameters = inspect.signature(kind).parameters
    arguments, lacking = _arguments(profiler, parameters, options)
    lacking += [name for name in arguments if name not in parameters and getattr(options, name, False)]
    return kind(**{name: value for name, value in arguments.items() if name in parameters}), lacking


def _arguments(profiler: Any, parameters: Any, options: NpuOptions) -> tuple[dict[str, Any], list[str]]:
    arguments: dict[str, Any] = {"l2_cache": options.l2_cache, "op_attr": options.op_attr}
    lacking = []
    metrics = options.aic_metrics
    if options.level not in _COUNTING_LEVELS:
        if metrics not in (NpuOptions().aic_metrics, "none"):
            lacking.append("aic_metrics")
        metrics = "none"
    for option, argument, owner, member in (
        ("level", "profiler_level", profiler.ProfilerLevel, options.level.capitalize()),
        ("aic_metrics", "aic_metrics", profiler.AiCMetrics, _METRICS[metrics]),
    ):
        if hasattr(owner, member):
            arguments[argument] = getattr(owner, member)
        else:
            lacking.append(option)
    exports = [getattr(profiler.ExportType, name) for name in _EXPORTS[options.export]]
    if len(exports) > 1 and not _takes_list(parameters.get("export_type")):
        # Older releases accept only one export type. For a list, they would export text.
        exports = exports[:1]
        lacking.append("export")
    arguments["export_type"] = exports if len(exports) > 1 else exports[0]
    if options.op_attr and options.export == "text":
        # Only databases contain the attributes of operators. For an export as text, torch_npu ignores the option.
        del arguments["op_attr"]
        lacking.append("op_attr")
    if options.mstx:
        # From 2.7 on, torch_npu has `mstx`. In these releases, the older `msprof_tx` only prints a warning.
        arguments["mstx" if "mstx" in parameters else "msprof_tx"] = True
        arguments["mstx_domain_exclude"] = ["communication"]
    return arguments, lacking


def _takes_list(parameter: inspect.Parameter | None) -> bool:
    return parameter is not None and "list" in str(parameter.annotation).lower()


# If one of these variables is set, other programs can start a profiler of torch_npu in this process. Two profilers of
# torch_npu disturb each other (profiler/_non_intrusive_profile.py).
_EXTERNAL_CONTROL = ("PROF_CONFIG_PATH", "MSMONITOR_USE_DAEMON")
# torch_npu replaces a worker's name that is longer by the host name (analysis/prof_common_func/_constant.py).
_MAX_NAME_CHARS = 225


class NpuTool(KinetoTool):
    """Tool that records with `torch_npu.profiler.profile` into a folder. The finisher analyses the folder later."""

    name = "npu"
    ending = file_names.NPU_FOLDER

    @staticmethod
    def unavailable() -> str:
        """If this process can't record with torch_npu, return the reason. Otherwise return an empty text.

        A profiler of torch_npu makes the process take an NPU (profiler_interface.py). A process that uses no NPU must
        not take one, for example a trainer that only drives other processes. So this method does not import torch_npu.
        In a process that uses an NPU, torch_npu is imported already: from torch 2.5 on, torch imports it.
        """
        npu = getattr(sys.modules.get("torch_npu"), "npu", None)
        try:
            return "" if npu is not None and npu.is_initialized() else "this process uses no NPU"
        except (AttributeError, RuntimeError) as error:  # the import of torch_npu has not ended, or has failed
            seam.pass_on(error)
            return f"torch_npu: {type(error).__name__}: {error}"

    def start(self, settings: Settings, raw: Path) -> list[str]:
        profiler = importlib.import_module("torch_npu.profiler")
        # torch_npu records stacks in the same way as torch. To record modules, it also needs stacks.
        contents, self.remark = foreign.without_stacks(settings.contents, ("stack", "module"))
        arguments, used = profile_arguments(profiler, contents)
        if "npu" in used:
            arguments["experimental_config"], self.lacking = experimental_config(profiler, settings.npu)
        raw.mkdir()
        with _restored_folder():
            # The handler sets the output folder of all torch_npu profilers in this process (`_restored_folder`).
            arguments["on_trace_ready"] = profiler.tensorboard_trace_handler(
                dir_name=str(raw),
                worker_name=raw.name.removesuffix(f"{self.ending}{file_names.PART}")[:_MAX_NAME_CHARS],
                # With True, the training thread would wait for a pool of forked processes that analyse the recording.
                analyse_flag=False,
            )
            self._profile = profiler.profile(**arguments)
            foreign.note_own_call(True)
            try:
                process.with_signals_blocked(self._profile.start)
            finally:
                foreign.note_own_call(False)
        if not any(raw.iterdir()):
            self.stop()
            raise RuntimeError("torch_npu's profiler did not start; see its output for the reason")
        return used

    def stop(self) -> None:
        self._profile.stop()
        self._profile = None

    def abort(self) -> None:
        foreign.note_own_call(False)
        if self._profile is not None:
            self.stop()

    def export(self, path: str) -> None:
        # torch_npu writes this file last. Without the file, torch_npu analyses nothing.
        if not list(Path(path).glob(f"*{self.ending}/profiler_info*.json")):
            raise OSError("torch_npu did not finish it; see its output for the reason")

    def busy(self) -> str:
        return super().busy() or "".join(
            f"{name} is set, so other programs may start torch_npu's profiler" for name in external_control()[:1]
        )


def profile_arguments(profiler: Any, contents: tuple[str, ...]) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments of `torch_npu.profiler.profile` for `contents`.

    If `contents` names no device, the recording contains the host and the NPU.

    Args:
        profiler: The module `torch_npu.profiler`.
        contents: Words of `AUTOPROF_CONTENTS`.

    Returns:
        The arguments, as a dict from parameter to value, and the contents that the installed torch_npu will record.
    """
    devices = ["cpu", "npu"]
    if any(word in DEVICES for word in contents):
        devices = [word for word in devices if word in contents] or ["cpu"]
    flags = accepted(profiler.profile, {FLAGS[word]: True for word in contents if word in FLAGS})
    arguments = {"activities": [getattr(profiler.ProfilerActivity, word.upper()) for word in devices]} | flags
    return arguments, devices + [word for word in contents if FLAGS.get(word) in flags]


@contextlib.contextmanager
def _restored_folder() -> Iterator[None]:
    """After the `with` block, restore the output folder that torch_npu used before.

    All torch_npu profilers of a process share one output folder, and autoprof's profiler changes it. If autoprof did
    not restore the folder, an existing profiler would write into autoprof's folder. For example, vllm-ascend makes a
    profiler at its start.
    """
    try:
        creator = importlib.import_module("torch_npu.profiler._profiler_path_creator").ProfPathCreator()
        earlier_names = {"worker_name": creator._worker_name, "dir_name": creator._dir_path}
    except (ImportError, AttributeError) as error:
        seam.pass_on(error)
        log.warning_once(f"torch_npu's output folder could not be restored: {error}")
        yield
        return
    try:
        yield
    finally:
        creator.init(**earlier_names)


def external_control() -> list[str]:
    """Return the set variables of this environment by which other programs can start a profiler of torch_npu."""
    return [name for name in _EXTERNAL_CONTROL if os.environ.get(name, "") not in ("", "0")]
