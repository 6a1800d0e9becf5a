"""Completion by the real shells that are installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from autoprof.cli.main import main
from tests.support.made_runs import make_run

BASH = """
complete() {{ :; }}
source {script}
COMP_WORDS=({words} ""); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_shtab_autoprof autoprof "" ""
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(("words", "offered"), [("autoprof", "analyze"), ("autoprof ls", "20261120-101010-aaaaaa")])
@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_a_shell_completes(
    shell: str, words: str, offered: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here")
    make_run(tmp_path / "autoprof_runs", "20261120-101010-aaaaaa")
    assert main(["completion", shell]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    code = BASH.format(script=script, words=words) if shell == "bash" else f'source {script}; complete -C "{words} "'
    done = subprocess.run([shell, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert offered in [line.partition("\t")[0] for line in done.stdout.splitlines()], done.stderr


def test_zsh_reads_its_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("there is no zsh here")
    assert main(["completion", "zsh"]) == 0
    script = capsys.readouterr().out
    assert subprocess.run(["zsh", "-n"], input=script, text=True, check=False).returncode == 0


def test_without_shtab_it_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    assert "pip install 'autoprof-rl[completion]'" in capsys.readouterr().err
