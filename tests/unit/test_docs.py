"""Documentation pages: their links, the modules that they name, their examples, their lengths."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from autoprof.cli.main import COMMANDS
from autoprof.config import selection, values
from autoprof.hooks import recipe
from tests.support import reference

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = [path.relative_to(ROOT).as_posix() for path in (ROOT / "autoprof").rglob("*.py")]
# Paths on pages that are examples, or outside autoprof/.
EXAMPLES = {"autoprof/cli/steps.py"}
OUTSIDE = ("examples/", "tests/", "bench/", "train.py", "small_trainer.py")


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes for the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^a-z0-9_ -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links() -> Iterator[tuple[str, str, str]]:
    """Yield page, file and anchor of each link to a file of the repository."""
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                path, _, anchor = target.partition("#")
                place = (page.parent / path).resolve() if path else page
                yield page.relative_to(ROOT).as_posix(), place.relative_to(ROOT).as_posix(), anchor


def blocks(page: Path, kind: str) -> list[str]:
    """Return the code blocks of one language."""
    found = re.findall(rf"^ *```{kind}\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for block in found]


@pytest.mark.parametrize(("page", "path", "anchor"), sorted(set(links())))
def test_link_targets_exist(page: str, path: str, anchor: str) -> None:
    assert (ROOT / path).exists()
    assert not anchor or anchor in anchors(ROOT / path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_modules_named_on_pages_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert {name for name in re.findall(r"`(autoprof/[a-z_/]+/)`", text) if not (ROOT / name).is_dir()} == set()
    named = set(re.findall(r"`([A-Za-z_/]+\.py)`", text)) - EXAMPLES
    named = {name for name in named if not name.startswith(OUTSIDE)}
    assert {name for name in named if not any(f"/{module}".endswith(f"/{name}") for module in MODULES)} == set()


def test_architecture_has_every_room() -> None:
    text = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    rooms = {path.parent.name for path in (ROOT / "autoprof").glob("*/__init__.py")}
    assert {room for room in rooms if f"| `{room}/` |" not in text} == set()


@pytest.mark.parametrize(("page", "most"), [("CONTRIBUTING.md", 210), ("docs/explanation/architecture.md", 150)])
def test_pages_for_developers_are_short(page: str, most: int) -> None:
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= most
    assert max(len(line) for line in lines if not line.startswith("|")) <= 120


def test_example_recipes_are_valid(tmp_path: Path) -> None:
    for block in blocks(ROOT / "CONTRIBUTING.md", "toml"):
        target = re.search(r'module = "(\w+)', block)
        assert target
        text = block if block.startswith("target") else f'target = "{target[1]}"\n{block}'
        path = tmp_path / f"{target[1]}.toml"
        path.write_text(text, encoding="utf-8")
        assert recipe.load(str(path))


def test_example_code_can_be_parsed() -> None:
    examples = blocks(ROOT / "CONTRIBUTING.md", "python")
    assert len(examples) == 5
    for example in examples:
        ast.parse(example)


def test_generated_parts_are_up_to_date() -> None:
    stale = [str(path.relative_to(ROOT)) for path, text in reference.pages().items() if path.read_text() != text]
    assert stale == [], "run make formats"


def test_each_command_has_one_section() -> None:
    titles = [line for line in reference.COMMAND_LINE.read_text().splitlines() if line.startswith("## autoprof ")]
    assert sorted(titles) == sorted({f"## autoprof {name}" for name in COMMANDS})


def test_choices_and_conditions_have_their_entries() -> None:
    text = reference.SETTINGS.read_text(encoding="utf-8")
    named = {*values.CONTENTS, *selection.CONDITION_PARSERS, *values.TOOLS}
    assert {name for name in named if f"`{name}`" not in text} == set()
    assert {name for name in selection.OWN if not re.search(rf"^\| `{name}[>:`]", text, re.MULTILINE)} == set()


def templates(modules: Iterable[Path], attributes: set[str], keyword: str = "") -> Iterator[tuple[str, ast.expr]]:
    """Yield the module, and the first argument or one keyword argument, of each call of these names."""
    for module in modules:
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and attributes & {
                getattr(node.func, "attr", ""),
                getattr(node.func, "id", ""),
            }:
                values = [each.value for each in node.keywords if each.arg == keyword] if keyword else node.args[:1]
                yield from ((module.name, value) for value in values)


def pattern(template: ast.expr) -> str:
    """Return a regular expression that matches the possible values of an expression of f-strings."""
    if isinstance(template, ast.Constant):
        return re.escape(str(template.value))
    if isinstance(template, ast.JoinedStr):
        return "".join(map(pattern, template.values))
    if isinstance(template, ast.BinOp):
        return pattern(template.left) + pattern(template.right)
    if isinstance(template, ast.IfExp):
        return f"(?:{pattern(template.body)}|{pattern(template.orelse)})"
    return ".*"


def test_example_findings_match_the_code() -> None:
    modules = (ROOT / "autoprof" / "report").glob("*.py")
    made = [pattern(template) for _, template in templates(modules, {"Finding"}, "text")]
    # Leave out patterns of texts that are composed of other texts: they match nearly anything.
    made = [each for each in made if len(each.replace(".*", "")) > 10]
    made.append(r"step \d+ has been stuck for .*: .*")
    made.append(r"step \d+: generation waited .* for \d+ of \d+ samples: .*")
    examples = re.findall(r"^### \w+\n\n```\n(.*)\n```$", (ROOT / "docs" / "findings.md").read_text(), re.MULTILINE)
    assert len(examples) > len(made) / 2
    assert [line for line in examples if not any(re.fullmatch(each, line) for each in made)] == []


def fragment(template: ast.expr) -> str:
    """Return the longest constant text of a message, up to a semicolon."""
    parts = template.values if isinstance(template, ast.JoinedStr) else [template]
    texts = [part.value.strip(" :;,.()") for part in parts if isinstance(part, ast.Constant)]
    return max((str(text).partition("; ")[0] for text in texts), key=len, default="")


def test_warnings_have_an_entry() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    warnings = templates(
        (ROOT / "autoprof").rglob("*.py"), {"warning", "warning_once", "switch_off", "_write_to_stderr"}
    )
    missing = [f"{module}: {part}" for module, template in warnings if (part := fragment(template)) not in text]
    assert missing == [], "docs/troubleshooting.md lists each message with its cause and remedy"
