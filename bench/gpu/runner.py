"""Runner of the rows: prints as it goes, and writes JSON and table after each fact."""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.gpu import page
from bench.gpu.facts import FAIL, PASS, SKIPPED, Failed, Outcome, Row, Skipped
from bench.gpu.workbench import Workbench

# Maximum duration of all rows; rows for which no time is left are skipped.
TOTAL_S = 470.0
# A row does not start with less time left.
LEAST_S = 15.0
# Factor for time limits on the CPU, which may be busy with other work. Times are not judged there.
CPU_PATIENCE = 10
RESULTS, PAGE = "gpu.json", "GPU.md"


class Runner:
    """Rows of one machine, and their results so far.

    Attributes:
        out: The folder of the results.
        machine: The description of the machine, when its row has run.
    """

    def __init__(
        self, device: str, out: Path, packages: Sequence[Path], named: bool, tell: Callable[[str], None]
    ) -> None:
        """Args:
        packages: Folders of unpacked wheels.
        named: True if the command line names the rows. Then rows for a GPU also run on the CPU.
        tell: Prints a line.
        """
        self.device, self.out = device, out
        self.machine: dict[str, Any] = {}
        self.outcomes: list[Outcome] = []
        self._packages, self._named, self._tell = packages, named, tell
        self._began = time.monotonic()
        self._started = time.strftime("%Y-%m-%d %H:%M:%S")
        self._finished = False

    def run(self, rows: Sequence[Row]) -> int:
        """Run rows one after the other. Return the exit status: 1 if something failed, 130 after an interruption."""
        self.out.mkdir(parents=True, exist_ok=True)
        try:
            with _ended_by_a_signal(), tempfile.TemporaryDirectory(prefix="autoprof-gpu-") as work:
                for row in rows:
                    self._row(row, Path(work))
            self._finished = True
        except KeyboardInterrupt:
            self._tell("\nit was cut off")
        self._save()
        counts = {state: sum(each.state == state for each in self.outcomes) for state in (PASS, FAIL, SKIPPED)}
        self._tell(f"\n{', '.join(f'{count} {state}' for state, count in counts.items())}; {self.out / PAGE}")
        return 130 if not self._finished else 1 if counts[FAIL] else 0

    def _row(self, row: Row, work: Path) -> None:
        outcome = Outcome(row.name, row.about)
        self.outcomes.append(outcome)
        self._tell(f"\n== {row.name}: {row.about}")
        patience = 1 if self.device != "cpu" else CPU_PATIENCE
        left = TOTAL_S * patience - (time.monotonic() - self._began)
        bench = Workbench(row.name, self.device, work, self.out, self._packages, min(row.limit_s * patience, left))
        bench.machine = self.machine
        began = time.monotonic()
        outcome.reason = self._reason(row, bench, left)
        try:
            for fact in () if outcome.reason else row.work(bench):
                outcome.facts.append(fact)
                self._tell(f"  {fact.state:<7}  {fact.text}{f': {fact.figure}' if fact.figure else ''}")
                outcome.settle()
                self._save()
            outcome.settle()
        except Skipped as error:
            outcome.reason = str(error)
        except BaseException as error:
            outcome.state = FAIL
            outcome.reason = str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}".strip(": ")
            if not isinstance(error, Exception):
                raise
        finally:
            outcome.seconds = round(time.monotonic() - began, 1)
            outcome.logs = bench.logs
            self._save()
        if outcome.reason:
            self._tell(f"  {outcome.state:<7}  {outcome.reason}")

    def _reason(self, row: Row, bench: Workbench, left_s: float) -> str:
        """Return the reason why a row is not run here, or an empty text."""
        if bench.gpu and not self.machine and self.outcomes[0].state == FAIL:
            return f"{self.outcomes[0].name} failed: torch can't use a GPU here"
        if row.gpu and not bench.gpu and not self._named:
            return "it needs a GPU"
        if self.machine.get("hip") and row.rocm:
            return row.rocm
        devices = self.machine.get("devices", row.devices)
        if bench.gpu and devices < row.devices:
            return f"it needs {row.devices} GPUs; there is {devices}"
        if absent := bench.lacks(*row.modules):
            return f"not installed: {', '.join(absent)}"
        if absent := [name for name in row.programs if shutil.which(name) is None]:
            return f"not on the PATH: {', '.join(absent)}"
        return f"the {TOTAL_S:.0f} s for all rows are over" if left_s < LEAST_S else ""

    def _save(self) -> None:
        """Write the results as they are now."""
        results = {
            "started": self._started,
            "seconds": round(time.monotonic() - self._began, 1),
            "finished": self._finished,
            "device": self.device,
            "machine": self.machine,
            "rows": [asdict(outcome) for outcome in self.outcomes],
        }
        for name, text in ((RESULTS, json.dumps(results, indent=1) + "\n"), (PAGE, page.render(results))):
            part = self.out / f".{name}.part"
            part.write_text(text)
            part.replace(self.out / name)


@contextmanager
def _ended_by_a_signal() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the run like Ctrl-C: programs are ended, and the results are kept."""

    def end(number: int, _: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
