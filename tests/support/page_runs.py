"""Runs the commands on the pages, compares what they print with what the pages show, and writes it anew.

python -m tests.support.page_runs [PAGE...]
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import autoprof
from autoprof.base.identity import HOST
from tests.support import report_runs
from tests.support.helpers import ROOT, clean_environment
from tests.support.page_blocks import PAGES, Block, Command, blocks, runs_in

# On the pages every host is called so, and the folder in which a page's commands run.
_HOST, _FOLDER = "node1", "/home/me/rl"
# What `needs` may name that this machine may have.
_THERE: dict[str, Callable[[], bool]] = {"api": lambda: hasattr(autoprof, "start")}
# What differs from run to run. Each becomes the same word on the page and in what was printed.
_VARIES = [
    (r"\d{8}-\d{6}-[0-9a-f]{6}", "RUN"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d(:\d\d)?", "DATE"),
    (r"(127\.0\.0\.1:\d+)/[\w-]{16,}", r"\1/SECRET"),
    (rf"\b({_HOST}[- ]|pid ?)\d+", r"\1PID"),
    (r"\(\d+\): ", "(PID): "),
    (r"[-+]?\d[\d,.]* ?(ns|us|µs|ms|s|min|h)\b", "TIME"),
    (r"\d[\d,.]* ?(B|bytes|kB|MB|GB)(?!\w)", "SIZE"),
    (r"[-+]?\d[\d,.]* ?%", "SHARE"),
    (r"[▁-▟━╸╺─]+", "BAR"),
    (r" {2,}", "  "),
]
_MOST_S = 600.0
_MADE, _MADE_ID = "a made run", "20261122-010203-abcdef"


def visible(printed: str, folder: Path) -> list[str]:
    """Return what was printed as a page shows it: neither this machine's names nor torch's own lines."""
    text = printed.replace(str(folder), _FOLDER).replace(os.path.realpath(folder), _FOLDER)
    text = re.sub(rf"(?<![\w/]){re.escape(HOST)}(?=[- .]?(pid)?\d|\b)", _HOST, text)
    return _aligned([line.rstrip() for line in text.splitlines() if not line.startswith("USDT:")])


def _aligned(lines: list[str]) -> list[str]:
    """Return the lines with columns under their headings again, which other names have moved."""
    found: list[str] = []
    for columns, group in groupby(lines, lambda line: 1 if line[:1].isspace() else len(re.split(" {2,}", line))):
        if columns == 1:
            found += group
        else:
            rows = [re.split(" {2,}", line) for line in group]
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            found += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return found


def _alike(line: str) -> str:
    for pattern, word in _VARIES:
        line = re.sub(pattern, word, line)
    return line.strip()


def _line_matches(shown: str, printed: str) -> bool:
    parts = [re.escape(_alike(part)) for part in shown.split("...")]
    return re.fullmatch(r"\s*.*\s*".join(parts), _alike(printed)) is not None


def matches(shown: list[str], printed: list[str]) -> bool:
    """Return whether a page shows what was printed: `...` is any text, in a line of its own any lines. Rows that are
    ordered by their time may have another order."""
    return _in_order(shown, printed) or _in_order(_by_name(shown), _by_name(printed))


def _in_order(shown: list[str], printed: list[str]) -> bool:
    if not shown:
        return not printed
    if shown[0].strip() == "...":
        return any(_in_order(shown[1:], printed[skipped:]) for skipped in range(len(printed) + 1))
    return bool(printed) and _line_matches(shown[0], printed[0]) and _in_order(shown[1:], printed[1:])


def _by_name(lines: list[str]) -> list[str]:
    """Return the lines with rows of times and shares that follow one another in the order of their names."""
    found: list[str] = []
    for ranked, group in groupby(lines, lambda line: "TIME  SHARE" in _alike(line)):
        rows = list(group)
        found += sorted(rows) if ranked else rows
    return found


def renewed(shown: list[str], printed: list[str]) -> list[str]:
    """Return what a page is to show in place of `shown`, with the lines that it leaves out left out again."""
    if matches(shown, printed):
        return shown
    # A line that still holds stays as it is, for a small difference.
    kept = [next((old for old in shown if old.strip() != "..." and _line_matches(old, new)), new) for new in printed]
    dots = [place for place, line in enumerate(shown) if line.strip() == "..."]
    if not dots:
        return kept
    first, last = dots[0], len(shown) - 1 - dots[-1]
    return kept if first + last >= len(kept) else [*kept[:first], "...", *kept[len(kept) - last :]]


class Session:
    """Commands of one page, one after another, in a folder of their own. Nothing that they start outlives it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[str]] = []
        self._exported: dict[str, str] = {}

    def run(self, command: str, until: str = "", status: int = 0) -> list[str]:
        """Return what a command prints, as a page shows it.

        Raises:
            AssertionError: It ends with another status, or not at all.
        """
        if exported := re.fullmatch(r"export (\w+)=(\S*)", command):
            self._exported[exported[1]] = exported[2]
            return []
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
        environment = clean_environment(PATH=path, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1", **self._exported)
        for name in ("DISPLAY", "WAYLAND_DISPLAY"):
            environment.pop(name, None)
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # Where the tests run in the background of a shell, it is ignored.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        self._started.append(process)
        printed = self._interrupted(process, until) if until else process.communicate(timeout=_MOST_S)[0]
        if until and "is taken" in printed:
            # A test beside this one has the port.
            time.sleep(2)
            return self.run(command, until, status)
        assert until or process.returncode == status, f"$ {command}\nended with {process.returncode}:\n{printed}"
        return visible(printed, self.folder)

    def _interrupted(self, process: subprocess.Popen[str], until: str) -> str:
        assert process.stdout is not None
        printed = []
        for line in process.stdout:
            printed.append(line)
            if until in line:
                break
        os.killpg(process.pid, signal.SIGINT)
        process.wait(_MOST_S)
        process.stdout.close()
        return "".join(printed)

    def end(self) -> None:
        """End what still runs in the background."""
        for process in self._started:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


@contextmanager
def session(page: Path) -> Iterator[Session]:
    """Give the page's commands a copy of the folder that it names, without the files that it writes itself."""
    kind, _, planted = runs_in(page).partition(", ")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made, "rl")
        if kind == _MADE:
            runs = folder / "autoprof_runs"
            causes = {cause: int(step) for cause, step in (each.split("=") for each in planted.split())}
            report_runs.write(runs / _MADE_ID, steps=20, **causes)
            (runs / "latest").symlink_to(_MADE_ID)
        else:
            left_out = shutil.ignore_patterns("autoprof_runs", "__pycache__")
            shutil.copytree(ROOT / kind, folder, ignore=left_out)
        for block in blocks(page):
            if block.title:
                (folder / block.title).unlink(missing_ok=True)
        shell = Session(folder)
        try:
            yield shell
        finally:
            shell.end()


def runnable(block: Block) -> bool:
    """Return whether a block is run here."""
    needs = block.marks.get("needs")
    return needs is None or (needs in _THERE and _THERE[needs]())


def outputs(page: Path) -> Iterator[tuple[Block, Command, list[str]]]:
    """Run a page's commands and yield each with what it printed."""
    with session(page) as shell:
        for block in blocks(page):
            if not runnable(block):
                continue
            if block.title:
                (shell.folder / block.title).write_text(block.text, encoding="utf-8")
            elif block.kind == "console":
                commands = block.commands()
                for command in commands:
                    status = int(block.marks.get("status", 0)) if command is commands[-1] else 0
                    yield block, command, shell.run(command.text, block.marks.get("until", ""), status)


def write(page: Path) -> int:
    """Write a page's outputs anew where they differ, and return how many did."""
    lines = page.read_text(encoding="utf-8").splitlines()
    moved = changed = 0
    for block, command, printed in outputs(page):
        new = renewed(command.output, printed)
        if new != command.output:
            first = command.first + moved
            indented = [f"{block.indent}{line}".rstrip() for line in new]
            lines[first : first + len(command.output)] = indented
            moved += len(new) - len(command.output)
            changed += 1
    page.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return changed


def main(given: list[str]) -> None:
    """Write the outputs of these pages anew, or of all."""
    for page in [Path(name).resolve() for name in given] or PAGES:
        if runs_in(page):
            print(f"{page.relative_to(ROOT)}: {write(page)} outputs changed", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
