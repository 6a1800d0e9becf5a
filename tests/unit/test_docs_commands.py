"""Commands, outputs, settings and examples on the pages: they are run if possible, and otherwise checked."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import autoprof
from autoprof.cli.main import COMMANDS
from autoprof.config import settings
from autoprof.config.settings import Settings
from autoprof.config.values import PREFIX
from autoprof.hooks import recipe
from tests.support import packages, page_blocks, page_runs
from tests.support.helpers import ROOT
from tests.support.page_blocks import PAGES, Block

BLOCKS = [block for page in PAGES for block in page_blocks.blocks(page)]
EVERY_PAGE = sorted({*PAGES, *(ROOT / "docs").rglob("*.md")})
RUN = [page for page in PAGES if page_blocks.runs_in(page)]
# Pages whose programs import torch.
TORCH = ("object-stores.md", "torchrun.md")
MODULES = [*(ROOT / "autoprof").rglob("*.py"), *(ROOT / "sitecustomize").iterdir()]
SOURCE = "\n".join(path.read_text(encoding="utf-8") for path in MODULES if path.is_file())
WRITTEN = set(re.findall(r"AUTOPROF_\w+", SOURCE)) | {f"{PREFIX}CONFIG", f"{PREFIX}RUN_DIR"}
# Variables whose values refer to files that don't exist here.
ELSEWHERE = {"AUTOPROF", "AUTOPROF_CONFIG", "AUTOPROF_RECIPES", "AUTOPROF_DIR"}


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def of_kind(*kinds: str) -> list[Block]:
    return [block for block in BLOCKS if block.kind in kinds]


def shell_lines(page: Path) -> list[str]:
    """Return the shell lines and the inline code of a page."""
    found = [line for block in page_blocks.blocks(page) for line in page_blocks.command_lines(block)]
    return [*found, *page_blocks.in_prose(page)]


@pytest.mark.parametrize("page", RUN, ids=name)
def test_commands_print_what_the_page_shows(page: Path) -> None:
    if page.name in TORCH:
        packages.need("torch")
    wrong = [
        f"{block.place}\n$ {command.text}\nthe page shows:\n{shown}\nprinted:\n{seen}"
        for block, command, printed in page_runs.outputs(page)
        if not page_runs.matches(command.output, printed)
        for shown, seen in [("\n".join(command.output), "\n".join(printed))]
    ]
    assert not wrong, "\n\n".join([*wrong, "make docs-outputs updates the outputs"])


def test_blocks_are_run_or_name_their_needs() -> None:
    for block in of_kind("console"):
        needs = "needs" in block.marks
        assert needs or block.page in RUN, f"{block.place}: the block is not run; add `needs`, or `runs in` to the page"
        outputs = [command for command in block.commands() if command.output]
        assert not (needs and outputs), f"{block.place}: this output is not checked"
    assert {block.kind for block in BLOCKS} <= {"console", "toml", "python", "sh", "yaml", "dockerfile"}
    assert [block.place for block in of_kind("sh", "yaml", "dockerfile") if "needs" not in block.marks] == []


def parse(arguments: list[str]) -> None:
    """Parse the arguments of a command with its own parser.

    Raises:
        AssertionError: The parser rejects the arguments.
    """
    if not arguments or arguments[0].startswith("-"):
        return
    command, *rest = arguments
    assert command in COMMANDS, f"{command} is not a command"
    parser = argparse.ArgumentParser(f"autoprof {command}", exit_on_error=False)
    importlib.import_module(f"autoprof.cli.{command}").add_arguments(parser)
    try:
        parser.parse_args(rest)
    except (SystemExit, argparse.ArgumentError) as error:
        raise AssertionError(f"autoprof {' '.join(arguments)}: {error}") from None


@pytest.mark.parametrize("page", EVERY_PAGE, ids=name)
def test_commands_accept_the_options_on_pages(page: Path) -> None:
    for line in shell_lines(page):
        # Leave out tables of commands, in which brackets mark optional arguments.
        if not re.search(r"\[|\.\.\.|\||COMMAND|ADDRESS", line):
            for arguments in page_blocks.autoprof_commands(line):
                # Other pages also quote messages, which begin with "autoprof".
                if page in PAGES or arguments[:1] in [[command] for command in COMMANDS]:
                    parse(arguments)


@pytest.mark.parametrize("page", EVERY_PAGE, ids=name)
def test_variables_on_pages_are_settings(page: Path) -> None:
    named = set(re.findall(r"\bAUTOPROF_[A-Z_]*[A-Z]", page.read_text(encoding="utf-8")))
    known = {PREFIX + field.upper() for field in Settings.__struct_fields__}
    # Other variables are named in the code, such as `AUTOPROF_RUN_DIR` and `AUTOPROF_CONFIG`.
    assert {each for each in named - known if each not in WRITTEN} == set()


def variables(block: Block) -> Iterator[tuple[str, str]]:
    """Yield name and value of each autoprof variable that a YAML file sets, also in YAML texts within it."""
    left: list[Any] = list(yaml.safe_load_all(block.text))
    while left:
        each = left.pop()
        if isinstance(each, dict):
            left += each.values()
            yield from ((key, value) for key, value in each.items() if str(key).startswith("AUTOPROF"))
        elif isinstance(each, list):
            left += each
        elif isinstance(each, str) and "\n" in each:
            left.append(yaml.safe_load(each))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_values_of_settings_on_pages_are_valid(page: Path, tmp_path: Path) -> None:
    pairs = [pair for line in shell_lines(page) for pair in page_blocks.assignments(line)]
    pairs += [pair for block in page_blocks.blocks(page) if block.kind == "yaml" for pair in variables(block)]
    for variable, value in pairs:
        assert isinstance(value, str)
        if variable not in ELSEWHERE and value and value != "URL" and "$" not in value:
            settings.load({variable: value}, tmp_path)


@pytest.mark.parametrize("block", of_kind("toml"), ids=lambda block: block.place)
def test_files_on_pages_are_valid(block: Block, tmp_path: Path) -> None:
    path = tmp_path / block.title
    path.write_text(block.text, encoding="utf-8")
    if block.title == settings.CONFIG_FILE:
        settings.load({}, tmp_path)
    else:
        assert recipe.load(str(path))


@pytest.mark.parametrize("block", of_kind("sh"), ids=lambda block: block.place)
def test_scripts_on_pages_can_be_parsed(block: Block) -> None:
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)


@pytest.mark.parametrize("block", of_kind("python"), ids=lambda block: block.place)
def test_functions_of_autoprof_on_pages_exist(block: Block) -> None:
    tree = ast.parse(re.sub("^%", "#", block.text, flags=re.MULTILINE))
    named = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "autoprof"
    }
    if page_runs.runnable(block):
        assert {each for each in named if not hasattr(autoprof, each)} == set()


def test_the_pages_are_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
    # status.md grows with each tested release, and a user reads only one of the trainers' pages.
    trainers = ("openrlhf.md", "areal.md", "swift.md", "more-trainers.md")
    words = {
        page: len([word for word in page.read_text(encoding="utf-8").split() if re.search(r"\w", word)])
        for page in PAGES
        if page.name != "status.md"
    }
    assert sum(count for page, count in words.items() if page.name not in trainers) < 5050
    assert [page.name for page, count in words.items() if page.name in trainers and count > 450] == []


@pytest.mark.parametrize(
    ("shown", "printed", "like"),
    [
        (["step 2 of 20261120-010203-abcdef"], ["step 2 of 20271120-040506-fedcba"], True),
        (["12.1 s  4 kB"], ["340 ms   1.2 MB"], True),
        (["9 s a step (1 regular step)"], ["8 s a step (no regular step; 1 writing traces)"], True),
        (["2 steps"], ["3 steps"], False),
        (["a ... z"], ["a b c z"], True),
        (["a", "...", "z"], ["a", "b", "c", "z"], True),
        (["a", "...", "z"], ["a", "b"], False),
        ([], ["more"], False),
        (["less"], [], False),
    ],
)
def test_outputs_are_compared(shown: list[str], printed: list[str], like: bool) -> None:
    assert page_runs.matches(shown, printed) is like


def test_updated_outputs_omit_the_same_lines() -> None:
    assert page_runs.renewed(["a", "...", "z"], ["a", "b", "c", "y"]) == ["a", "...", "y"]
    assert page_runs.renewed(["1 s: ...", "old"], ["2 s: more", "new"]) == ["1 s: ...", "new"]
    assert page_runs.renewed([], ["all"]) == ["all"]
