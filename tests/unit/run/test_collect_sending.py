"""Copies of collected runs, to fsspec's own file systems and to one that fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from autoprof.base import redact
from autoprof.config.settings import Settings, load
from autoprof.run import upload
from autoprof.run.upload import NoTarget, Sending, lacks
from tests.support.helpers import Autoprof, Python

TRACE = "global_step_000002/a.pt.trace.json.gz"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "20261122-000000-abcdef"
    files = {
        TRACE: "t" * 1000,
        "clocks/h-1.jsonl": "{}\n",
        "journal/h-1.jsonl": "{}\n",
        "run.json": '{"state": "ended"}',
    }
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)
    (folder / TRACE).with_name("b.pt.trace.json.gz.part").write_text("x")
    (folder / ".on_finish").touch()
    (folder / "linked.json").symlink_to("/etc/passwd")
    return folder


def send(run: Path, url: str) -> tuple[Sending, list[str]]:
    made = Sending(run, url)
    return made, [each.line for each in made.send(lambda done: None)]


WHOLE = ["clocks/h-1.jsonl", TRACE, "journal/h-1.jsonl", "run.json"]


def test_a_folder_gets_the_complete_files_under_their_names(run: Path, tmp_path: Path) -> None:
    made, missing = send(run, f"file://{tmp_path}/there")
    assert (made.sent, missing) == (4, [])
    there = tmp_path / "there" / run.name
    assert sorted(str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()) == WHOLE
    assert (there / TRACE).read_text() == "t" * 1000


def test_what_is_there_is_not_copied_again_and_what_changed_is(run: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/there"
    send(run, url)
    assert send(run, url)[0].sent == 0
    (run / "journal" / "h-1.jsonl").write_text("{}\n{}\n")
    (tmp_path / "there" / run.name / TRACE).write_text("cut")
    made, missing = send(run, url)
    assert (made.sent, missing) == (2, [])
    assert (tmp_path / "there" / run.name / TRACE).read_text() == "t" * 1000
    # A copy to another URL starts from nothing.
    assert send(run, f"file://{tmp_path}/elsewhere")[0].sent == 4


class Flaky(MemoryFileSystem):
    """An object store: no renames, and files appear when they are complete. `fails` selects failing calls."""

    protocol = "flaky"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    fails: Any = staticmethod(lambda path: None)
    order: list[str] = []

    def put_file(self, lpath: str, rpath: str, **more: Any) -> None:
        type(self).fails(rpath)
        super().put_file(lpath, rpath, **more)
        self.order.append(rpath.partition("/20261122-000000-abcdef/")[2])


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Flaky]]:
    monkeypatch.setattr(upload, "_PAUSE_S", 0.0)
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    Flaky.store.clear()
    Flaky.order.clear()
    yield Flaky
    Flaky.fails = staticmethod(lambda path: None)
    Flaky.clear_instance_cache()


def test_run_json_comes_last(run: Path, flaky: type[Flaky]) -> None:
    assert send(run, "flaky://bucket/runs")[1] == []
    assert sorted(flaky.order) == WHOLE
    assert flaky.order[-1] == "run.json"
    assert not any(path.endswith(".part") for path in flaky.store)


@pytest.mark.fault("an object store fails now and then", "tries again", "nothing")
def test_what_fails_is_tried_again(run: Path, flaky: type[Flaky]) -> None:
    failed: set[str] = set()

    def once(path: str) -> None:
        if path not in failed:
            failed.add(path)
            raise ConnectionError("reset by peer")

    flaky.fails = staticmethod(once)
    made, missing = send(run, "flaky://bucket/runs")
    assert (made.sent, missing) == (4, [])


@pytest.mark.fault("an object store refuses a file", "copies the rest", "that file, and run.json, which are named")
def test_what_fails_always_is_named_and_the_run_is_not_said_to_be_whole(run: Path, flaky: type[Flaky]) -> None:
    def always(path: str) -> None:
        if path.endswith(".gz"):
            raise PermissionError("denied: token=abcdef12345")

    flaky.fails = staticmethod(always)
    made, missing = send(run, "flaky://bucket/runs")
    assert missing == [
        f"{TRACE}: PermissionError: denied: token=***",
        "run.json: it is copied last, after all other files",
    ]
    assert "run.json" not in flaky.order
    flaky.fails = staticmethod(lambda path: None)
    made, missing = send(run, "flaky://bucket/runs")
    assert (made.sent, missing) == (2, [])


@pytest.mark.fault("an object store is not there", "gives up after a few files", "the copy, which is named")
def test_where_nothing_can_be_copied_not_all_is_tried(run: Path, flaky: type[Flaky]) -> None:
    tried = []

    def never(path: str) -> None:
        tried.append(path)
        raise ConnectionError("refused")

    for number in range(20):
        (run / "clocks" / f"h-{number}.jsonl").write_text("{}")
    flaky.fails = staticmethod(never)
    made, missing = send(run, "flaky://bucket/runs")
    assert (made.sent, len(set(tried)), len(missing)) == (0, 10, 11)
    assert missing[-1] == "13 more files, not tried after 10 failures in a row"


@pytest.mark.fault("an object store keeps less than was sent", "tries again, then names it", "that file")
def test_a_size_that_is_not_right_is_noticed(run: Path, flaky: type[Flaky], monkeypatch: pytest.MonkeyPatch) -> None:
    info = Flaky.info

    def less(self: Flaky, path: str, **more: Any) -> Any:
        found = info(self, path, **more)
        return found | {"size": found["size"] - 1} if path.endswith(".gz") else found

    monkeypatch.setattr(Flaky, "info", less)
    assert "OSError: 999 bytes were copied instead of 1000" in send(run, "flaky://bucket/runs")[1][0]


@pytest.mark.parametrize(
    ("url", "why"), [("nothing://x/y", "fsspec does not support nothing://"), ("gs://bucket/x", "the package gcsfs")]
)
def test_a_place_that_can_not_be_reached_says_what_lacks(run: Path, url: str, why: str) -> None:
    assert why in lacks(url)
    with pytest.raises(NoTarget, match=why):
        Sending(run, url)


def test_without_fsspec_it_is_said_which_extra_brings_it(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "autoprof-rl[remote]" in lacks("s3://bucket")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("sftp://me:pw@host/x", "sftp://host/x"),
        ("sftp://me@host/x", "sftp://host/x"),
        ("s3://bucket/x?token=abc", "s3://bucket/x"),
        ("simplecache::s3://k:s@bucket/x", "simplecache::s3://bucket/x"),
        ("s3://bucket/x", "s3://bucket/x"),
    ],
)
def test_a_url_is_shown_without_what_may_be_secret(url: str, shown: str) -> None:
    assert redact.url(url) == shown


def test_at_the_end_of_a_run_it_is_copied_when_it_is_whole(tmp_path: Path, go: Python) -> None:
    """No Ray, no captures: the timeline alone."""
    done = go("Trainer().fit()", AUTOPROF_STEPS="", AUTOPROF_COLLECT=f"file://{tmp_path}/there")
    assert "autoprof" not in done.stderr
    run = (tmp_path / "autoprof_runs" / "latest").resolve()
    there = tmp_path / "there" / run.name
    assert json.loads((there / "run.json").read_text())["state"] == "ended"
    assert [path.name for path in (there / "journal").iterdir()] == [path.name for path in run.glob("journal/*")]


def test_other_processes_are_told_that_it_is_collected_and_not_where_to(python: Python) -> None:
    code = """
import os
from autoprof.run import runtime
print(runtime.start().settings.collect, os.environ["AUTOPROF_RUN_INFO"])
"""
    done = python(code, AUTOPROF="1", AUTOPROF_RUN_ID="x", AUTOPROF_COLLECT="sftp://me:secret@host/x")
    own, _, handed = done.stdout.partition(" ")
    assert own == "sftp://me:secret@host/x"
    assert json.loads(handed)["settings"]["collect"] == "1"


def test_run_json_shows_no_user_and_no_password() -> None:
    settings = Settings(collect="sftp://me:secret@host/x?key=secret")
    assert settings.public()["collect"] == "sftp://host/x"


@pytest.mark.parametrize(
    ("text", "meant"),
    [("1", "1"), ("on", "1"), ("0", ""), ("", ""), ("Off", ""), ("s3://b/x", "s3://b/x"), ("a::b://c", "a::b://c")],
)
def test_the_setting(text: str, meant: str, tmp_path: Path) -> None:
    assert load({"AUTOPROF_COLLECT": text}, tmp_path).collect == meant


def test_a_wrong_value_is_named_without_its_secrets(autoprof: Autoprof) -> None:
    done = autoprof("run", "--collect", "me:pw@host ftp://me:secret@host/x", "--", "true")
    assert done.returncode == 2
    assert "AUTOPROF_COLLECT: got " in done.stderr
    assert "it takes 1, 0, or a URL such as s3://bucket/folder" in done.stderr
    assert "secret" not in done.stderr
