"""Counts of the code, such as modules and calls, without timing: `make figures`. Two runs print the same counts.

* Modules are the `*.py` files of `autoprof/`. A line of code has a token other than comments and docstrings. Lines of
  tests are all lines of the `*.py` files in `tests/`.
* Calls of a stage are calls of autoprof's named Python functions in the stage's thread, counted by `sys.setprofile`.
  Files are the files that define these functions. File changes are calls of a function in another file than the
  previous call. The first call is included.
* File operations are calls of `posix` functions that take a path or a descriptor, and of `fcntl` and `_io`, from
  autoprof's code in the same thread.
* A captured stage is recorded by torch's profiler (`AUTOPROF_CONTENTS=cpu`). Each stage is counted in several steps,
  and the smallest count is shown: the first stage imports modules, and flushes of the timeline depend on the time.
* Modules imported are entries of `sys.modules`, packages included, after the command has read a made run of 8 ranks.
  Modules called have a function that the command calls in its main thread.
* Files of a process are the files with its pid in their names. They are counted during a stage of an uncaptured step.
* Broad clauses are `except` clauses that name `Exception` or `BaseException`, alone or in a tuple, and bare ones.
  `with seam.guard(...)` and `seam.suppress(Exception)` count, too.
* Class names used twice are names that more than one `class` statement in `autoprof/` defines.

`TARGETS` has the target of each count.
"""

from __future__ import annotations

import ast
import io
import json
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import processes
from bench.large_runs import RUN_ID
from bench.processes import CHILDREN, MAIN, ROOT
from bench.results import grid

_CHILD = CHILDREN / "figures.py"
_TOY = {"AUTOPROF": "1", "AUTOPROF_RECIPES": str(CHILDREN / "toy.toml")}
_BROAD = {"Exception", "BaseException"}
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
# Rows of the table, in the order of the table, each with its target.
TARGETS = {
    "modules": "150",
    "lines of code": "22,000",
    "lines of tests": "40,000",
    "uncaptured stage: calls": "35",
    "uncaptured stage: files": "10",
    "uncaptured stage: file changes": "",
    "uncaptured stage: file operations": "2",
    "captured stage: calls": "120",
    "captured stage: files": "20",
    "captured stage: file changes": "",
    "captured stage: file operations": "",
    "doctor: modules imported": "80",
    "doctor RUN: modules imported": "80",
    "doctor RUN: modules called": "",
    "report: modules imported": "",
    "report: modules called": "50",
    "files of the process that starts a run": "1 or 2",
    "files of a worker": "1 or 2",
    "broad clauses": "45",
    "class names used twice": "0",
}


def code_lines(source: str) -> int:
    """Return the number of lines with code. Comments, docstrings and blank lines do not count."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - set(_docstring_lines(ast.parse(source))))


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match node.body:
                case [ast.Expr(value=ast.Constant(value=str())) as docstring, *_]:
                    yield from range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1)


def broad_clauses(tree: ast.Module) -> int:
    """Return the number of `except` clauses and `with` blocks that catch all exceptions."""
    nodes = list(ast.walk(tree))
    caught_types = [node.type for node in nodes if isinstance(node, ast.ExceptHandler)]
    calls = [node.context_expr for node in nodes if isinstance(node, ast.withitem)]
    blocks = [call for call in calls if isinstance(call, ast.Call) and _catches_everything(call)]
    return sum(_is_broad(caught_type) for caught_type in caught_types) + len(blocks)


def _catches_everything(call: ast.Call) -> bool:
    function = ast.unparse(call.func)
    return function == "seam.guard" or (function.endswith("suppress") and any(map(_is_broad, call.args)))


def _is_broad(caught: ast.expr | None) -> bool:
    if isinstance(caught, ast.Tuple):
        return any(map(_is_broad, caught.elts))
    return caught is None or (isinstance(caught, ast.Name) and caught.id in _BROAD)


def used_twice(trees: Sequence[ast.Module]) -> int:
    """Return the number of names that more than one class statement defines."""
    names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return sum(count > 1 for count in names.values())


def of_code(package: Path = ROOT / "autoprof", tests: Path = ROOT / "tests") -> dict[str, int]:
    """Return the counts that come from the source files alone, by row of the table."""
    sources = [path.read_text() for path in sorted(package.rglob("*.py"))]
    trees = [ast.parse(source) for source in sources]
    return {
        "modules": len(sources),
        "lines of code": sum(map(code_lines, sources)),
        "lines of tests": sum(len(path.read_text().splitlines()) for path in tests.rglob("*.py")),
        "broad clauses": sum(map(broad_clauses, trees)),
        "class names used twice": used_twice(trees),
    }


def of_stage(folder: Path, *, captured: bool) -> dict[str, int]:
    """Return the counts of one stage in a run of the toy trainer, by row of the table."""
    stage_kind = "captured" if captured else "uncaptured"
    counts = _child([stage_kind], folder, AUTOPROF_STEPS="::" if captured else "", AUTOPROF_CONTENTS="cpu")
    return {f"{stage_kind} stage: {name}": count for name, count in counts.items()}


def of_processes(folder: Path) -> dict[str, int]:
    """Return the number of files that each process has in a run of the toy trainer, by row of the table."""
    files = _child(["files"], folder, AUTOPROF_STEPS="")
    return {"files of the process that starts a run": len(files["first"]), "files of a worker": len(files["worker"])}


def of_commands(folder: Path) -> dict[str, int]:
    """Return the counts of modules that commands import and call, by row of the table. The commands read a made run."""
    size_options = ["--ranks", "8", "--steps", "12", "--gpus", "4"]
    processes.run([MAIN, "-m", "bench.large_runs", folder / RUN_ID, *size_options])
    run = [RUN_ID, "--dir", str(folder)]
    arguments_by_title = {"doctor": ["doctor"], "doctor RUN": ["doctor", *run], "report": ["report", *run]}
    counts = {}
    for command, arguments in arguments_by_title.items():
        for name, count in _child(["command", *arguments]).items():
            counts[f"{command}: modules {name}"] = count
    return counts


def _child(arguments: Sequence[str], folder: Path | None = None, **variables: str) -> dict[str, Any]:
    autoprof_variables = _TOY | {"AUTOPROF_DIR": str(folder)} if folder else {}
    output = processes.run([MAIN, _CHILD, *arguments], autoprof_variables | variables).output
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def table(counts: Mapping[str, int]) -> str:
    """Return a Markdown table with the counts and their targets."""
    rows = [[name, f"{counts[name]:,}", target] for name, target in TARGETS.items()]
    return grid(["", "today", "target"], rows)


def main() -> None:
    """Count, and print the table."""
    with tempfile.TemporaryDirectory() as folder:
        toy_folder = Path(folder, "toy")
        counts = of_code() | of_stage(toy_folder, captured=False) | of_stage(toy_folder, captured=True)
        counts |= of_processes(toy_folder) | of_commands(Path(folder, "made"))
    print(table(counts))


if __name__ == "__main__":
    main()
