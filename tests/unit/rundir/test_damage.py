"""Damaged files of a run: no command ends with a traceback, and readable fields are kept."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoprof.cli import arguments, main, open, trigger
from autoprof.cli.open import Server
from autoprof.hooks import recipe
from autoprof.report import html
from autoprof.run import cluster
from autoprof.rundir import layout, processes, runs
from autoprof.rundir.layout import RunDir
from autoprof.rundir.records import CaptureMeta, CollectedFile, MergedMeta, OutOfMemoryMeta, RunFile
from autoprof.windows import requests
from autoprof.windows.requests import Trigger
from tests.support import damage
from tests.support.report_runs import START_NS
from tests.support.traces import kineto, process, save

CAPTURE = "actor.update_actor.rank0.n1.pid7"
CLOCK = {
    "start": {"unix_ns": START_NS, "monotonic_ns": 5},
    "stop": {"unix_ns": START_NS + 10**9, "monotonic_ns": 10**9},
}
META = {"step": 1, "role": "actor", "stage": "update_actor", "rank": 0, "replica": None, "host": "n1", "pid": 7}
FILES: dict[str, Any] = {
    "run.json": {
        **{"id": "run", "command": "x", "state": "running", "host": "n1", "pid": 1, "ticks": 1, "started": 1.0},
        **{"hosts": ["n1"], "recipes": ["verl"], "versions": {"verl": "0.9.1"}},
        **{"earlier": [{"host": "n1", "pid": 5, "state": "ended"}]},
        "settings": {"steps": "1", "recipes": [], "tool": ["torch"]},
        "nodes": [{"id": "a", "host": "n2", "directory": "/x"}],
    },
    "journal/n1-5.jsonl": {
        **{"kind": "process", "host": "n1", "pid": 5, "clock": CLOCK["start"], "version": "1", "ticks": 5},
        **{"node": "a", "process": "x", "versions": {"verl": "0.9.1"}, "hooks": {"verl/step": "called"}},
    },
    "journal/n1-6.jsonl": {"kind": "hook", "hook": "verl/step", "state": "applied", "called": True},
    f"global_step_000001/{CAPTURE}.meta.json": META
    | {
        "clock": CLOCK,
        "state": "complete",
        "reason": "",
        "tool": "torch",
        "bytes": 5,
        "steps": [1],
        "device_events": 0,
    },
    "control/1-1-00000001.json.taken": {"run": "run", "steps": 1, "became": {"state": "open", "captured": [1]}},
    "collected.json": {"missing": [{"host": "n2", "path": "x", "reason": "y"}]},
    "oom/x.meta.json": META | {"asked_bytes": 5, "free_bytes": 5},
    "journal/n1-7.jsonl": {
        **{"kind": "step", "name": "step", "step": 1, "role": "trainer", "rank": 0, "start_ns": START_NS},
        **{"end_ns": START_NS + 10**9, "ids": {"replica": 1, "sample": "x"}, "counts": {"prompt_tokens": 5}},
    },
    "clocks/n1-7.jsonl": {"host": "n2", "offset_ns": 0, "error_ns": 5, "unix_ns": START_NS},
    ".collect/index.jsonl": {"target": "x", "node": "a", "path": "x", "size": 5, "mtime_ns": 5, "sha256": "x"},
    f"global_step_000001/{CAPTURE}.pt.trace.json.gz": None,
}
COMMANDS = [
    *(["ls"], ["ls", "run"], ["ls", "run", "--json"], ["doctor", "run"], ["doctor", "run", "--json"]),
    *(["report", "run", "--json"], ["merge", "run", "--step", "1"]),
    *(["trigger", "run"], ["collect", "run", "--ray", "none"], ["analyse", "run"]),
]


def written(folder: Path) -> Path:
    run = folder / "run"
    for name, content in FILES.items():
        if content is None:
            save(run / name, kineto(process(7, "ray")))
        else:
            (run / name).parent.mkdir(parents=True, exist_ok=True)
            (run / name).write_text(json.dumps(content, separators=(",", ":")) + "\n")
    return run


@pytest.fixture
def by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace slow parts that read no file of a run: Ray, the page, recipes, building the parser."""

    def unreachable(address: str) -> Any:
        raise cluster.Unreachable("no cluster")

    monkeypatch.setattr(cluster, "connected", unreachable)
    monkeypatch.setattr(html, "write", lambda figures, path: path.write_text(html.__name__))
    monkeypatch.setattr(recipe, "load", functools.cache(recipe.load))
    new = arguments.Parser
    parser = functools.cache(lambda name: new(name, main.COMMANDS[name]))
    monkeypatch.setattr(arguments, "Parser", lambda name, _: parser(name))


def _no_json(word: str) -> None:
    pytest.fail(f"{word} is no JSON")


def ask_all(run: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    for command in COMMANDS:
        try:
            status = main.main([*command, "--dir", str(run.parent)])
        except Exception as error:
            pytest.fail(f"{command}: {what}: {type(error).__name__}: {error}")
        out, said = capsys.readouterr()
        (out + said).encode()
        assert status in (0, 1, 2), (command, what)
        assert "Traceback" not in said
        if command[-1] == "--json" and status != 2 and out:
            json.loads(out, parse_constant=_no_json)
    ask_the_run(run)
    if (run / "run.json").exists():
        with Server(0) as server:
            open.fill(server, runs.read(run), None)


def ask_the_run(run: Path) -> None:
    """Read the files that a running run reads, and the files that the next run reads."""
    directory = RunDir(run)
    runs.killed(run)
    processes.summary(processes.read(run), {})
    requests.taken(directory, requests.names(directory), set())
    requests.states(directory)
    (view,) = trigger.OnDisk(runs.read(run)).look([1])
    view.became("1-1-00000001.json")
    view.open_request(Trigger(run="run"))


@pytest.mark.fault("any JSON file of a run is damaged", "no traceback; the rest is read", "what is damaged, said")
@pytest.mark.parametrize("name", FILES)
def test_whatever_stands_in_a_file(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], by_themselves: None
) -> None:
    run = written(tmp_path)
    # Every 7th wrong value, with a different start in each file, so that each value is used somewhere.
    ways = list(damage.damages(run / name))
    first = len(damage.TEXTS) + len(damage.PLACES)
    for what, put in [*ways[:first], *ways[first + len(name) % 7 :: 7]]:
        put()
        ask_all(run, capsys, what)


@pytest.mark.parametrize("kind", [RunFile, CaptureMeta, MergedMeta, OutOfMemoryMeta, CollectedFile])
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_a_document_keeps_what_is_readable(kind: Any, data: st.DataObject) -> None:
    fields = st.sampled_from(sorted(kind.__struct_fields__))
    content = data.draw(st.dictionaries(fields, damage.anything(), max_size=4)) | {"known to nobody": 5}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.json")
        path.write_text(json.dumps(content))
        left_out: list[str] = []
        kept = layout.fields(path, kind, left_out)
        assert layout.record(kept, kind) == layout.read_json(path, kind)
    assert kept["known to nobody"] == 5 or left_out
    assert left_out or kept.keys() == content.keys()
    json.dumps(kept, allow_nan=False).encode()


def test_what_is_left_out_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = written(tmp_path)
    (run / "run.json").write_text(json.dumps(FILES["run.json"] | {"pid": "x", "hosts": ["n1", 5]}))
    assert main.main(["doctor", "run", "--dir", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "run.json: pid is left out (Expected `int`, got `str`); hosts[1] is left out" in said
    assert runs.read(run).info.hosts == ["n1"]
