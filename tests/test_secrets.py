"""What never gets into a file or onto a terminal: secrets, and what names and errors would have a terminal do."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from autoprof import control, doctor, log, paths, rundir, runtime, tables
from autoprof.asked import Windows
from autoprof.naming import Subject
from autoprof.placement import Placement
from autoprof.redaction import hidden, plain, redacted
from autoprof.rundir import RunDir

SECRET = "hunter2hunter2"


@pytest.mark.parametrize(
    "command",
    [
        ["train", f"--wandb-key={SECRET}"],
        ["train", "--wandb_key", SECRET],
        ["train", "--hf-token", SECRET],
        ["env", f"HF_TOKEN={SECRET}", "train"],
        ["train", f"trainer.wandb_api_key={SECRET}"],
        ["train", f"+trainer.logger.password={SECRET}"],
        ["train", f"ray_init.runtime_env.env_vars={{WANDB_API_KEY:{SECRET},A:b}}"],
        ["train", f'--config={{"api_key": "{SECRET}", "lr": 1}}'],
        ["curl", "-H", f"Authorization: Bearer {SECRET}"],
        ["train", f"--proxy=https://user:{SECRET}@host/path"],
        ["train", f"redis://:{SECRET}@host"],
        ["train", f"hf_{SECRET}{SECRET}"],
        ["train", f"x=sk-proj-{SECRET}{SECRET}"],
        ["train", f"ghp_{SECRET}{SECRET}"],
        ["train", "AKIA" + "HUNTER2HUNTER2AB"],
        ["train", f"eyJ{SECRET}.{SECRET}.{SECRET}"],
    ],
)
def test_a_command_line_loses_its_secrets(command: list[str]) -> None:
    shown = redacted(command)
    assert SECRET not in shown
    assert "HUNTER2" not in shown
    assert "***" in shown


@pytest.mark.parametrize(
    "command",
    [
        "python -m verl.trainer.main_ppo data.prompt_key=prompt data.max_prompt_length=512 reward.key=score",
        "train --max-tokens=100 --tokenizer=/models/tok tokenizer_mode=auto actor.lr=1e-6",
        "train task-force-1 https://host/path?a=b PWD=/here",
    ],
)
def test_what_is_no_secret_stays(command: str) -> None:
    assert redacted(command.split()).replace("'", "") == command


def test_an_error_keeps_what_it_says_and_loses_what_it_gives_away() -> None:
    error = f"RuntimeEnvSetupError: {{'env_vars': {{'HF_TOKEN': '{SECRET}', 'LR': '1'}}}} failed, password: {SECRET}"
    assert hidden(error) == "RuntimeEnvSetupError: {'env_vars': {'HF_TOKEN': ***, 'LR': '1'}} failed, password: ***"


@pytest.mark.fault("a secret in the text of an error", "goes on", "nothing; it is left out of files and log")
def test_what_goes_wrong_is_written_without_secrets(joined: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = joined()
    run.hooks._worth_writing = True
    runtime.report("x", ValueError(f"api_key={SECRET}"))
    Placement(run, Subject(step=1, role="actor", stage="a", rank=0), run.settings, "torch").fail(f"token={SECRET}")
    written = [path.read_text() for path in run.rundir.path.rglob("*.json")]
    assert len(written) == 3  # run.json as well
    assert sum("***" in text for text in written) == 2
    assert not any(SECRET in text for text in written)


def test_a_line_of_the_log_is_one_line_that_a_terminal_only_shows() -> None:
    record = log.logging.LogRecord("autoprof", 30, "", 0, f"a\nb \x1b[31mred\x07 \u202eltr token={SECRET}", None, None)
    assert log._Plain("autoprof: %(message)s").format(record) == (
        "autoprof: a b \\x1b[31mred\\x07 \\u202eltr token=***"
    )


def test_a_text_that_can_be_shown_is_shown_as_it_is() -> None:
    assert plain("Größe 数据 😀 [red] \\x") == "Größe 数据 😀 [red] \\x"


@pytest.mark.parametrize("terminal", [True, False])
def test_tables_show_names_and_obey_none(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tables, "Console", lambda **_: Console(force_terminal=terminal, width=200, color_system=None))
    tables.show(["capture"], [["[red]a[/red] \\[bold]b \x1b[2J\n"], ["[/nothing]"]])
    shown = capsys.readouterr().out
    assert "[red]a[/red] \\[bold]b \\x1b[2J\\n" in shown
    assert "[/nothing]" in shown


def test_doctor_shows_names_and_obeys_none(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.show(doctor.Report(subject="\x1b[2J", facts={"a\r": "b\x1b]0;x\x07"}, problems=["\x1b[31m[red]"]))
    assert not set("\x1b\r\x07") & set(capsys.readouterr().out)


@pytest.mark.parametrize(
    "path", ["__class__.__init__.__globals__", "__dict__", "step.__globals__", "__class__.__subclasses__", "__code__"]
)
def test_a_path_of_a_recipe_reads_nothing_of_pythons_own(path: str) -> None:
    with pytest.raises(LookupError, match="Python's own"):
        paths.follow(SimpleNamespace(step=lambda: None), path, default=1)


def test_a_path_reads_and_never_calls() -> None:
    called: list[int] = []
    root = SimpleNamespace(state=SimpleNamespace(boom=lambda: called.append(1)), name="x")
    assert paths.follow(root, "state.boom") is root.state.boom
    with pytest.raises(LookupError):
        paths.follow(root, "state.boom()")
    assert paths.follow(root, "__class__.__name__") == "SimpleNamespace"
    assert called == []


HOSTILE: dict[str, bytes] = {
    "huge": b'{"run": "run", "at": "' + b"1," * 100_000 + b'1"}',
    "nested": b"[" * 30_000 + b"]" * 30_000,
    "nested-values": b'{"run": "run", "overrides": {"ranks": ' + b"[" * 20_000 + b"]" * 20_000 + b"}}",
    "wrong-types": b'{"run": "run", "steps": "5", "overrides": []}',
    "not-a-number": b'{"run": "run", "steps": NaN}',
    "endless": b'{"run": "run", "steps": 1000000000}',
    "binary": bytes(range(256)),
    "empty": b"",
    "list": b"[1]",
    "foreign": b'{"run": "another"}',
    "unknown": b'{"run": "run", "command": "rm -rf /"}',
    "settings": b'{"run": "run", "overrides": {"on_finish": "rm -rf /"}}',
    "code": b'{"run": "run", "at": "__import__(\'os\').system(\'x\')"}',
}


def refused(run: RunDir) -> list[str]:
    return [name for name, became in control.states(run).items() if became.state == "refused" and became.reason]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.make(made.control)
    return made


@pytest.mark.fault("a request in control/ that is none", "goes on", "the request; refused and named")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_request_that_is_none_is_refused_and_named(run: RunDir, name: str, caplog: pytest.LogCaptureFixture) -> None:
    (run.control / f"{name}.json").write_bytes(HOSTILE[name])
    windows = Windows()
    windows.look(run, 0)
    assert not windows.any_to_come
    assert refused(run) == [f"{name}.json"]


def test_requests_that_are_no_files_of_the_users_are_refused_at_once(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "good.json").write_text(json.dumps({"run": "run"}))
    os.mkfifo(run.control / "pipe.json")
    (run.control / "link.json").symlink_to(tmp_path / "good.json")
    (run.control / "folder.json").mkdir()
    (run.control / "new\nline\x1b[2J.json").write_bytes(b"x")
    assert control.take(run) == []
    assert len(refused(run)) == 4


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
def test_a_request_of_another_user_is_refused(run: RunDir) -> None:
    path = run.control / "theirs.json"
    path.write_text(json.dumps({"run": "run"}))
    os.chown(path, 12345, -1)
    assert control.take(run) == []
    assert refused(run) == ["theirs.json"]
    # A disk that has another owner for root has it for the run, too.
    rundir.write_json(path, {"run": "run"})
    os.chown(path, 12345, -1)
    os.chown(run.path, 12345, -1)
    assert len(control.take(run)) == 1
