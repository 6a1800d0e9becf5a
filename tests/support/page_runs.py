"""Runner of the commands in the documentation: compares their output with the pages, and updates the pages.

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

# Names on the pages for every host, and for the folder in which a page's commands run.
_HOST, _FOLDER = "node1", "/home/me/rl"
# Needs that this machine may fulfil -> function that returns True if it does.
_FULFILLED: dict[str, Callable[[], bool]] = {"api": lambda: hasattr(autoprof, "start")}
# Patterns of text that differs between runs -> word that replaces it, on the page and in the output.
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
    # On a busy machine, autoprof may still write the traces of a step in the next one.
    (r"\((\d+|no) (regular|captured|warm-up|writing)[^)]*\)", "(STEPS)"),
    (r"this run has \d+", "this run has COUNT"),
    (r": about TIME .* at \w+\.py:\d+ \w+( TIME)?", ": about TIME at PLACE"),
    (r" {2,}", "  "),
]
# Patterns of the ids, dates and process ids that a page shows, and the text for the n-th of them. So the outputs of one
# page agree, and stay as they are when another run makes them.
_STEADY = [
    (r"(?<!\d)\d{8}-\d{6}-[0-9a-f]{6}", lambda n: f"20261126-10{n:02}12-{0xC8AA80 + 0x91B37 * n:06x}"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d(?::\d\d)?", lambda n: f"2026-11-26 10:{n:02}:15"),
    (rf"(?<=\b{_HOST}[- ])\d+|(?<=\bpid)\d+|(?<=\bpid )\d+", lambda n: str(4101 + 12 * n)),
]
_TIMEOUT_S = 600.0
_MADE, _MADE_ID = "a made run", "20261122-010203-abcdef"


def visible(printed: str, folder: Path) -> list[str]:
    """Return the output as a page shows it, without names of this machine and without lines of torch."""
    text = printed.replace(str(folder), _FOLDER).replace(os.path.realpath(folder), _FOLDER)
    text = re.sub(rf"((?<![\w/])|(?<=journal/)){re.escape(HOST)}(?=[- .]?(pid)?\d|\b)", _HOST, text)
    return _aligned([line.rstrip() for line in text.splitlines() if not line.startswith("USDT:")])


def _aligned(lines: list[str]) -> list[str]:
    """Align columns with their headings again, after names of another length were inserted."""
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
    """Return True if a page shows the printed output.

    `...` matches any text, and on its own line any lines. Rows sorted by time may have another order.
    """
    return _in_order(shown, printed) or _in_order(_by_name(shown), _by_name(printed))


def _in_order(shown: list[str], printed: list[str]) -> bool:
    if not shown:
        return not printed
    if shown[0].strip() == "...":
        return any(_in_order(shown[1:], printed[skipped:]) for skipped in range(len(printed) + 1))
    return bool(printed) and _line_matches(shown[0], printed[0]) and _in_order(shown[1:], printed[1:])


def _by_name(lines: list[str]) -> list[str]:
    """Sort consecutive rows of times and shares by name."""
    found: list[str] = []
    for ranked, group in groupby(lines, lambda line: "TIME  SHARE" in _alike(line)):
        rows = list(group)
        found += sorted(rows) if ranked else rows
    return found


def renewed(shown: list[str], printed: list[str]) -> list[str]:
    """Return the new lines of a page in place of `shown`, with `...` for the same omitted lines."""
    if matches(shown, printed):
        return shown
    # Keep a line that still matches, so that the page changes little.
    kept = [next((old for old in shown if old.strip() != "..." and _line_matches(old, new)), new) for new in printed]
    dots = [place for place, line in enumerate(shown) if line.strip() == "..."]
    if not dots:
        return kept
    first, last = dots[0], len(shown) - 1 - dots[-1]
    return kept if first + last >= len(kept) else [*kept[:first], "...", *kept[len(kept) - last :]]


class Session:
    """Runner of one page's commands, one after another, in their own folder. `end` kills all that they started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[str]] = []
        self._exported: dict[str, str] = {}
        # For each pattern of `_STEADY`: the texts in the outputs so far, and the texts that replace them.
        self._texts: list[dict[str, str]] = [{} for _ in _STEADY]

    def run(self, command: str, until: str = "", status: int = 0) -> list[str]:
        """Run a command and return its output, as a page shows it.

        Raises:
            AssertionError: The command ended with another status.
            TimeoutExpired: The command did not end.
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
            # A shell that runs the tests in the background has them ignore SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        self._started.append(process)
        printed = self._interrupted(process, until) if until else process.communicate(timeout=_TIMEOUT_S)[0]
        if until and "is taken" in printed:
            # Another test uses the port now.
            time.sleep(2)
            return self.run(command, until, status)
        assert until or process.returncode == status, f"$ {command}\nended with {process.returncode}:\n{printed}"
        return [self._steady(line) for line in visible(printed, self.folder)]

    def _steady(self, line: str) -> str:
        """Replace ids, dates and process ids, each always by the same text."""
        for texts, (pattern, text) in zip(self._texts, _STEADY, strict=True):
            texts.setdefault(_MADE_ID, _MADE_ID)
            line = re.sub(pattern, lambda m, t=texts, f=text: t.setdefault(m[0], f(len(t) - 1)), line)
        return line

    def _interrupted(self, process: subprocess.Popen[str], until: str) -> str:
        assert process.stdout is not None
        printed = []
        for line in process.stdout:
            printed.append(line)
            if until in line:
                break
        os.killpg(process.pid, signal.SIGINT)
        process.wait(_TIMEOUT_S)
        process.stdout.close()
        return "".join(printed)

    def end(self) -> None:
        """Kill the commands that still run in the background."""
        for process in self._started:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


@contextmanager
def session(page: Path) -> Iterator[Session]:
    """Make a copy of the folder that the page names, without the files that its own blocks write."""
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
    """Return True if this machine can run the block."""
    needs = block.marks.get("needs")
    return needs is None or (needs in _FULFILLED and _FULFILLED[needs]())


def outputs(page: Path) -> Iterator[tuple[Block, Command, list[str]]]:
    """Run a page's commands, and yield each with its output."""
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
    """Update the outputs on a page that differ, and return their number."""
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
    """Update the outputs of the given pages, or of all pages."""
    for page in [Path(name).resolve() for name in given] or PAGES:
        if runs_in(page):
            print(f"{page.relative_to(ROOT)}: {write(page)} outputs changed", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
