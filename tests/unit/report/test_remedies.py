"""Each finding has a remedy; its settings exist in the trainer, and its command runs as it is."""

from __future__ import annotations

import importlib.util
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autoprof.cli.main import main
from autoprof.config import settings
from autoprof.report import build, findings, hangs, remedies, rules
from autoprof.report.build import ReportRequest
from autoprof.report.html import page
from autoprof.report.markdown import text
from autoprof.report.model import Finding, RunFigures
from autoprof.report.remedies import REMEDIES, SETTINGS, Advised, remedied, setting_names
from autoprof.rundir import runs
from tests.support import helpers
from tests.support.hung_runs import HungRun
from tests.support.report_runs import write

COMPARED = {"slower_step", "slower_stage", "slower_operator", "fewer_tokens"}
RUN = "20261122-010203-abcdef"


def figures(run: Path, step: int | None = None, against: int | None = None) -> RunFigures:
    read = runs.read(run)
    other = None if against is None else read
    return build.report_figures(ReportRequest(run=read, step=step, against=other, against_step=against))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with causes in two steps. Step 5 is captured."""
    parent = tmp_path_factory.mktemp("parent") / "autoprof_runs"
    write(parent / RUN, captured=5, slow_tool=5, slow_rank=7)
    return parent / RUN


def test_each_kind_of_finding_has_a_remedy() -> None:
    assert findings.KIND in rules.KINDS
    assert hangs.HANG in rules.KINDS
    assert REMEDIES.keys() == COMPARED | set(rules.KINDS)
    for remedy in REMEDIES.values():
        assert set(remedy.topics) <= {topic for topics in SETTINGS.values() for topic in topics}


def test_each_output_has_the_remedy_and_the_command(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent.parent)
    whole = figures(run)
    expected = {
        "slow_tool": ("Set a timeout for the tool.", f"autoprof open {RUN} --step 5"),
        "slow_rank": (
            f"{REMEDIES['slow_rank'].advice}. Settings of verl 0.9.1: trainer.balance_batch.",
            "export AUTOPROF_WHEN='rank>1.2x' AUTOPROF_RANKS=0,5",
        ),
    }
    assert {each.kind: (each.remedy, each.command) for each in whole.findings} == expected
    assert [step.findings for step in whole.details if step.number == 5] == [
        [each for each in whole.findings if each.step == 5]
    ]
    assert main(["report", RUN, "-o", "report.html"]) == 0
    printed = capsys.readouterr().out.splitlines()
    for remedy, command in expected.values():
        assert [line for line in printed if line.strip() == command] != []
        assert [line for line in printed if line.strip() == remedy] != []
        assert f"- {remedy}" in text(whole)
        assert f"`{command}`" in text(whole)
    assert f"<code>autoprof open {RUN} --step 5</code>" in page(whole)


def test_steps_that_are_compared_have_remedies(run: Path) -> None:
    compared = figures(run, 7, against=6)
    assert compared.comparison is not None
    assert {each.kind for each in compared.comparison.findings} == {"slower_stage", "fewer_tokens"}
    assert all(each.remedy and each.command for each in compared.comparison.findings)


def test_a_remedy_names_the_settings_of_the_release() -> None:
    def named(trainer: str, version: str, kind: str) -> str:
        finding = Finding(kind=kind, text="", evidence=[], seconds=1.0)
        return remedied([finding], Advised("run", False, trainer=trainer, version=version))[0].remedy

    assert named("verl", "0.9.1", "checkpoint") == "Save less often. Settings of verl 0.9.1: trainer.save_freq."
    assert named("verl", "0.7.0.dev", "slow_reward").endswith(" reward_model.launch_reward_fn_async.")
    assert named("verl", "0.8.0", "slow_reward").endswith(" reward.num_workers.")
    assert named("openrlhf", "0.10.0", "checkpoint").endswith(" --save_steps.")
    assert named("openrlhf", "0.11.2", "checkpoint").endswith(" --ckpt.save_steps.")
    assert named("trl", "unknown", "checkpoint") == named("", "", "checkpoint") == "Save less often."


def test_a_slow_step_that_was_captured_is_not_to_be_captured() -> None:
    finding = Finding(kind="slow_step", text="step 5 took 9 s", evidence=[], seconds=1, step=5)
    (shown,) = remedied([finding], Advised("run", False, captured=frozenset([5])))
    assert (shown.remedy, shown.command) == ("Look at the trace of this step.", "autoprof open run --step 5")
    assert remedied([finding], Advised("run", False))[0].remedy == "Capture the step after the next slow one."


def test_a_slow_rank_that_was_captured_is_shown() -> None:
    finding = Finding(kind="slow_rank", text="step 5: actor rank 3 was slow in x: 2 s", evidence=[], seconds=1, step=5)
    advised = Advised("run", False, captured=frozenset([5]), captured_ranks=frozenset([(5, 0)]))
    chosen = "export AUTOPROF_WHEN='rank>1.2x' AUTOPROF_RANKS=0,3"
    assert remedied([finding], advised)[0].command == chosen
    advised = advised._replace(captured_ranks=frozenset([(5, 0), (5, 3)]))
    assert remedied([finding], advised)[0].command == "autoprof open run --step 5"


def test_programs_with_other_settings_name_none() -> None:
    versions = {"verl": "0.9.1", "transformers": "5.0"}
    assert remedies._trainer(versions, "python -m verl.trainer.main_ppo") == ("verl", "0.9.1")
    assert remedies._trainer(versions, "torchrun -m verl.trainer.sft_trainer") == ("", "")


def test_the_documentation_has_each_remedy_and_setting() -> None:
    documentation = (helpers.ROOT / "docs" / "findings.md").read_text()
    sections = {part.partition("\n")[0]: part for part in documentation.split("\n### ")}
    for kind, remedy in REMEDIES.items():
        assert f"\nRemedy: {remedy.advice[0].lower()}{remedy.advice[1:]}.\n" in f"{sections[kind]}\n"
    named = [setting for topics in SETTINGS.values() for each in topics.values() for setting in each]
    assert [name for name, _ in named if f"`{name}`" not in documentation] == []


@pytest.mark.needs("verl")
def test_the_settings_exist_in_the_installed_verl() -> None:
    from importlib.metadata import version

    import yaml

    spec = importlib.util.find_spec("verl")
    assert spec is not None
    assert spec.origin is not None
    config = Path(spec.origin).parent / "trainer" / "config" / "_generated_ppo_trainer.yaml"
    names = [name for topic in SETTINGS["verl"] for name in setting_names("verl", version("verl"), topic)]
    assert len(names) == 12
    for name in names:
        part = yaml.safe_load(config.read_text())
        for key in name.split("."):
            assert key in part, name
            part = part[key]


def in_shell(command: str, folder: Path, more: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command of a finding in a shell. `autoprof` is the one of this environment."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return helpers.run(["bash", "-c", f"{command}{more}"], cwd=folder, PATH=path)


def commands(run: Path, *, going_on: bool = False, captured: bool = True, names: tuple[str, ...] = ()) -> set[str]:
    """Return the commands of all kinds of findings about step 5 of a run."""
    steps = frozenset([5])
    name = remedies.name_of(str(run))
    advised = Advised(name, going_on, captured=steps if captured else frozenset(), timed=steps)
    kinds = names or tuple(REMEDIES)
    made = [Finding(kind=kind, text="", evidence=[], seconds=1.0, step=step) for kind in kinds for step in (5, None)]
    return {finding.command for finding in remedied(made, advised)} - {""}


@pytest.mark.parametrize("captured", [True, False])
def test_the_commands_of_a_run_that_ended_work(run: Path, captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent.parent)
    kinds = set()
    for command in commands(run, captured=captured):
        words = shlex.split(command)
        kinds.add(" ".join(words[:2]))
        if words[0] == "export":
            done = in_shell(command, run.parent.parent, "; env")
            given = dict(line.partition("=")[::2] for line in done.stdout.splitlines() if line.startswith("AUTOPROF_"))
            assert len(given) == len(words) - 1
            settings.load(given, run.parent)
        elif words[1] == "open":
            assert words[2:] in ([RUN], [RUN, "--step", "5"])
        else:
            done = in_shell(command, run.parent.parent)
            assert (done.returncode, done.stderr) in ((0, ""), (1, "")), command
    expected = {"autoprof doctor", "autoprof open", "export AUTOPROF_TOOL=memory"}
    expected |= set() if captured else {"autoprof report"}
    assert {kind for kind in kinds if not kind.startswith("export AUTOPROF_WHEN")} == expected


@pytest.mark.parametrize("captured", [5, None])
def test_the_command_that_opens_a_run_works(
    tmp_path: Path, captured: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "autoprof_runs" / RUN
    write(folder, captured=captured)
    monkeypatch.chdir(tmp_path)
    made = commands(folder, names=("cpu_bound",), captured=captured is not None)
    opened = [command for command in made if command.startswith("autoprof open")]
    assert len(opened) == (2 if captured else 1)
    for command in opened:
        words = [sys.executable, "-m", *shlex.split(command), "--no-browser", "--port", "0"]
        process = helpers.started(words, cwd=tmp_path)
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            assert any(line.startswith("Ctrl-C ends it") for line in lines), process.communicate()[1]
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=30)[1] == ""
        finally:
            process.kill()
            process.communicate()


def test_a_run_in_another_folder_is_named_by_its_path(run: Path, tmp_path: Path) -> None:
    odd = tmp_path / "my runs" / "first run"
    odd.parent.mkdir()
    odd.symlink_to(run)
    (command,) = commands(odd, names=("death",))
    assert shlex.split(command) == ["autoprof", "doctor", str(run)]
    done = in_shell(command, tmp_path)
    assert done.stdout.startswith(f"run: {run}"), done.stderr


LOOP = """
import select, sys, time
import autoprof
number = 0
while not select.select([0], [], [], 0)[0]:
    number += 1
    with autoprof.step(number), autoprof.stage("update_actor"):
        time.sleep(0.05)
    if number == 3:
        print("ready", flush=True)
"""


def test_the_commands_of_a_running_run_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(LOOP)
    process = helpers.started([sys.executable, "train.py"], cwd=tmp_path, AUTOPROF="1", AUTOPROF_STEPS="")
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        monkeypatch.chdir(tmp_path)
        folder = (tmp_path / "autoprof_runs" / "latest").resolve()
        kinds = ("hang", "no_stage", "slow_step", "slow_rank", "memory")
        made = commands(folder, going_on=True, captured=False, names=kinds)
        assert made == {
            f"autoprof stacks {folder.name}",
            f"autoprof trigger {folder.name}",
            f"autoprof trigger {folder.name} --ranks 0,1",
            f"autoprof trigger {folder.name} --tool memory",
        }
        for command in made:
            done = in_shell(command, tmp_path)
            assert (done.returncode, done.stderr) == (0, ""), command
    finally:
        process.communicate(timeout=60)


def test_doctor_says_what_to_do_about_a_hang(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = HungRun(tmp_path / "run")
    main(["doctor", str(run.folder)])
    assert f"{REMEDIES['hang'].advice}. autoprof stacks {run.folder}" in " ".join(capsys.readouterr().out.split())


def test_a_step_that_was_stuck_has_no_stacks_to_ask_for() -> None:
    advised = Advised("run", going_on=True)
    text = "step 4 has been stuck for 9 s: actor has been in was stuck for 9 s"
    made = [Finding(kind="hang", text=text, evidence=[], seconds=9, is_past=is_past) for is_past in (True, False)]
    assert [each.command for each in remedied(made, advised)] == ["autoprof doctor run", "autoprof stacks run"]
