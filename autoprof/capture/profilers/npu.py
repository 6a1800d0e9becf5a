"""torch_npu.profiler as a tool: Ascend's own, which writes a folder that ends in `_ascend_pt`.

What is known of it is read in the source of torch_npu 2.5.1, 2.7.1, 2.9.0, 2.13.0 and 2.14.0; none of it ran on an NPU.
Its public calls raise nothing: they print what went wrong and go on, so what they did is looked up on disk.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from autoprof.base import interrupts, log, threads
from autoprof.base.originals import os
from autoprof.capture.profilers import arguments as profiler_arguments
from autoprof.capture.profilers import foreign, profile_functions
from autoprof.capture.profilers.npu_config import experimental_config
from autoprof.capture.profilers.torch import DEVICES, FLAGS, mark, stamp
from autoprof.config.settings import Settings
from autoprof.rundir import file_names

# With either of them torch_npu profiles by itself when it is told to, and two of its profilers are in each other's way
# (profiler/_non_intrusive_profile.py).
_BY_ITSELF = ("PROF_CONFIG_PATH", "MSMONITOR_USE_DAEMON")
# Longer names of workers are replaced by the host's (analysis/prof_common_func/_constant.py).
_LONGEST_NAME = 225


class NpuTool:
    """Records with `torch_npu.profiler.profile` into a folder, without analysing what it recorded.

    Attributes:
        lacking: Options of `AUTOPROF_NPU` that this torch_npu has not, known from the start on.
    """

    name = "npu"
    ending = file_names.NPU_FOLDER
    lost: Sequence[str] = ()

    def __init__(self) -> None:
        self._profile: Any = None
        self.lacking: list[str] = []
        self.remark = ""

    @staticmethod
    def unavailable() -> str:
        """Return why this process can't record with torch_npu, or an empty text.

        A profiler of torch_npu makes the process take an NPU (profiler_interface.py), which one that uses none must
        not, such as a trainer that only drives others. So nothing is imported here either: torch does that from 2.5
        on.
        """
        npu = getattr(sys.modules.get("torch_npu"), "npu", None)
        try:
            return "" if npu is not None and npu.is_initialized() else "this process uses no NPU"
        except Exception as error:
            interrupts.pass_on(error)
            return f"torch_npu: {type(error).__name__}: {error}"

    def start(self, settings: Settings, raw: Path) -> list[str]:
        profiler = importlib.import_module("torch_npu.profiler")
        # torch_npu records stacks as torch does, and for modules, too.
        contents, self.remark = profile_functions.without_stacks(settings.contents, ("stack", "module"))
        arguments, used = profile_arguments(profiler, contents)
        if "npu" in used:
            arguments["experimental_config"], self.lacking = experimental_config(profiler, settings.npu)
        raw.mkdir()
        with _own_folder():
            # The handler sets the folder of the whole process, whatever profiler it is handed to.
            arguments["on_trace_ready"] = profiler.tensorboard_trace_handler(
                dir_name=str(raw),
                worker_name=raw.name.removesuffix(f"{self.ending}{file_names.PART}")[:_LONGEST_NAME],
                # It would analyse in a pool of forked processes and wait for them, in the training thread.
                analyse_flag=False,
            )
            self._profile = profiler.profile(**arguments)
            foreign.own(True)
            try:
                threads.blocking(self._profile.start)
            finally:
                foreign.own(False)
        if not any(raw.iterdir()):
            self._profile.stop()
            raise RuntimeError("torch_npu's profiler did not start; what it printed says why")
        return used

    def stamp(self, subject: dict[str, Any]) -> None:
        stamp(self._profile, subject)

    def mark(self, name: str) -> Callable[[], None]:
        return mark(name)

    def stop(self) -> None:
        self._profile.stop()
        self._profile = None

    def abort(self) -> None:
        foreign.own(False)
        if self._profile is not None:
            self.stop()

    def export(self, path: str) -> None:
        # The last file that is written: without it torch_npu analyses nothing.
        if not list(Path(path).glob(f"*{self.ending}/profiler_info*.json")):
            raise OSError("torch_npu did not finish it; what it printed says why")

    def busy(self) -> str:
        return foreign.busy() or "".join(
            f"{name} is set, with which torch_npu profiles by itself" for name in by_itself()[:1]
        )


def profile_arguments(profiler: Any, contents: tuple[str, ...]) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments of `torch_npu.profiler.profile` for `contents`, and the contents that this torch_npu takes.

    Without a device in `contents` the host and the NPU are recorded.
    """
    devices = ["cpu", "npu"]
    if any(word in DEVICES for word in contents):
        devices = [word for word in devices if word in contents] or ["cpu"]
    flags = profiler_arguments.taken(profiler.profile, {FLAGS[word]: True for word in contents if word in FLAGS})
    arguments = {"activities": [getattr(profiler.ProfilerActivity, word.upper()) for word in devices]} | flags
    return arguments, devices + [word for word in contents if FLAGS.get(word) in flags]


@contextlib.contextmanager
def _own_folder() -> Iterator[None]:
    """Set torch_npu's folder back afterwards: it is one for the process, and a profiler that was made before, such as
    the one that vllm-ascend makes at start, would go on in autoprof's."""
    try:
        creator = importlib.import_module("torch_npu.profiler._profiler_path_creator").ProfPathCreator()
        before = {"worker_name": creator._worker_name, "dir_name": creator._dir_path}
    except (ImportError, AttributeError) as error:
        interrupts.pass_on(error)
        log.warning_once(f"torch_npu's output folder could not be restored: {error}")
        yield
        return
    try:
        yield
    finally:
        creator.init(**before)


def by_itself() -> list[str]:
    """Return the variables of this environment with which torch_npu profiles by itself."""
    return [name for name in _BY_ITSELF if os.environ.get(name, "") not in ("", "0")]
