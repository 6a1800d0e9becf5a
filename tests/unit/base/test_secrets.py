"""Redaction: no secret and no control sequence gets into a file or onto a terminal."""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import re
import shlex
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from autoprof import _boot
from autoprof.base import log, named_secrets, redact
from autoprof.base.redact import hidden, hidden_in, plain, redacted
from autoprof.capture.artifacts import Subject
from autoprof.capture.profilers.torch import TorchTool
from autoprof.capture.recorder import Capture
from autoprof.cli import console, doctor
from autoprof.cli.documents import Report
from autoprof.config.settings import SettingsError, check, check_condition
from autoprof.hooks import behaviour
from autoprof.run import journal, runtime, upload
from autoprof.rundir import layout
from autoprof.rundir.layout import RunDir
from autoprof.windows import requests
from autoprof.windows.chooser import OpenTriggers
from tests.support.regex_steps import Counting
from tests.support.secret_forms import ARGUMENT, MUST_HIDE, MUST_SHOW, TOKEN, WEBHOOKS

SECRET = "hunter2hunter2"


HIDE = [
    pytest.param(kind, texts, id=f"{kind}: {form}") for kind in MUST_HIDE for form, texts in MUST_HIDE[kind].items()
]
SHOW = [pytest.param(kind, text, id=f"{kind}: {text}") for kind in MUST_SHOW for text in MUST_SHOW[kind]]


def test_the_title_of_a_process_is_no_name_of_a_secret(capsys: pytest.CaptureFixture[str]) -> None:
    title = "vm 7 python -c 'for _ in []: pass'"
    shown = doctor._masked_report(Report(subject="run: x", facts={title: "3 applied", "folder": f"token={SECRET}"}))
    assert shown.facts == {title: "3 applied", "folder": "token=***"}


@pytest.mark.parametrize(("kind", "texts"), HIDE)
def test_a_secret_of_this_form_is_hidden(kind: str, texts: list[tuple[str, str]]) -> None:
    for text, secret in texts:
        shows = [hidden(text)]
        if kind in (ARGUMENT, TOKEN) or text.startswith("env "):
            shows.append(redacted(shlex.split(text)))
        for shown in shows:
            assert secret not in shown
            assert secret[-12:] not in shown, "its end is visible"
            assert "***" in shown
            assert text.split()[-1][-1:] == shown.split()[-1][-1:] or shown.endswith(("***", "'")), "too much is hidden"


@pytest.mark.parametrize(
    "command",
    [
        ["wandb", "login", "mykey-short"],
        ["wandb", "login", "--relogin", "mykey-short"],
        ["/opt/my tools/sshpass", "-p", "mykey-short"],
        ["/data/My Drive/bin/mysql", "-pmykey-short"],
        ["train", "--password", "mysql", "-pmykey-short"],
    ],
)
def test_a_value_that_only_its_program_makes_a_secret_is_hidden(command: list[str]) -> None:
    shown = redacted(command)
    assert "mykey" not in shown
    assert "***" in shown


@pytest.mark.parametrize(("kind", "text"), SHOW)
def test_a_text_of_this_form_stays(kind: str, text: str) -> None:
    assert hidden(text) == text
    if kind == ARGUMENT:
        assert redacted(shlex.split(text)) == shlex.join(shlex.split(text))


def of_requests(url: str) -> BaseException:
    return caught(lambda: pytest.importorskip("requests").post(url, json={}, timeout=60))


def of_urllib3(url: str) -> BaseException:
    return caught(lambda: pytest.importorskip("urllib3").PoolManager(retries=1).request("POST", url))


def of_httpx(url: str) -> BaseException:
    httpx = pytest.importorskip("httpx")
    return caught(httpx.Response(404, request=httpx.Request("POST", url)).raise_for_status)


def of_aiohttp(url: str) -> BaseException:
    aiohttp = pytest.importorskip("aiohttp")
    info = aiohttp.RequestInfo(aiohttp.client.URL(url), "POST", {}, aiohttp.client.URL(url))
    return aiohttp.ClientResponseError(info, (), status=404, message="Not Found")


def caught(function: Callable[[], object]) -> BaseException:
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError


@pytest.fixture
def closed_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connect to a closed loopback port instead of each host."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    find = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: find("127.0.0.1", port, type=socket.SOCK_STREAM))


@pytest.mark.parametrize("library", [of_requests, of_urllib3, of_httpx, of_aiohttp])
@pytest.mark.parametrize("name", WEBHOOKS)
def test_the_error_of_an_http_library_has_no_secret_of_a_webhook(
    name: str, library: Callable[[str], BaseException], closed_port: None
) -> None:
    host, path = WEBHOOKS[name]
    secret = f"{SECRET}{SECRET}abcdefgh"
    error = library(f"https://{host}{path.format(secret)}")
    for text in (str(error), repr(error)):
        assert secret in text
        assert SECRET not in hidden(text)
        assert host in hidden(text)


def test_what_follows_a_secret_stays() -> None:
    command = ["train", "--key", SECRET, f"trainer.wandb.key={SECRET}", "trainer.nnodes=1", "data.parquet"]
    assert redacted(command) == "train --key '***' 'trainer.wandb.key=***' trainer.nnodes=1 data.parquet"
    assert hidden(f"API key provided: {SECRET}. See the docs.") == "API key provided: ***. See the docs."
    assert hidden(f"api_key={SECRET}, model='m'") == "api_key=***, model='m'"
    assert hidden(f'{{"api_key": "{SECRET}", "lr": 1}}') == '{"api_key": "***", "lr": 1}'


@pytest.mark.parametrize("option", ["-c", "-lc", "-ec"])
def test_in_a_shells_script_only_the_secret_is_hidden(option: str) -> None:
    script = "LR=1 HF_TOKEN={} python t.py --lr 3e-4 > out 2>&1"
    for made in (script, script.removeprefix("LR=1 "), f"export A=b; {script}", script.replace("{}", "'{}'")):
        given, shown = ["bash", option, made.format(SECRET)], made.format("***")
        assert redacted(given) == shlex.join(["bash", option, shown])
        assert hidden(f"Command '{given}' failed") == f"Command '{['bash', option, shown]}' failed"
    # An argument that is not a script is hidden to its end: a password may have spaces.
    assert redacted(["env", f"HF_TOKEN={SECRET} python"]) == "env 'HF_TOKEN=***'"


def test_an_apostrophe_does_not_end_a_password() -> None:
    assert redacted(["t", "--password=it's x", "--lr", "1"]) == "t '--password=***' --lr 1"
    assert hidden("t --password=it's x y --lr 1") == "t --password=*** --lr 1"
    assert hidden("t --password=it's x\nnext") == "t --password=***\nnext"
    assert hidden("""['t', "--password=it's x", 'y']""") == """['t', "--password=***", 'y']"""
    assert hidden("password=hun'ter2, n=1") == "password=***, n=1"


def test_the_value_of_a_name_in_json_is_hidden() -> None:
    content = {"api_key": SECRET, "token": None, "pad_token": "<pad>", "lists": [{"hfToken": SECRET}], "steps": "2"}
    shown = {"api_key": "***", "token": None, "pad_token": "<pad>", "lists": [{"hfToken": "***"}], "steps": "2"}
    assert hidden_in(content) == shown


def test_an_error_keeps_what_it_says_and_loses_what_it_gives_away() -> None:
    error = f"RuntimeEnvSetupError: {{'env_vars': {{'HF_TOKEN': '{SECRET}', 'LR': '1'}}}} failed, password: {SECRET}"
    assert hidden(error) == "RuntimeEnvSetupError: {'env_vars': {'HF_TOKEN': '***', 'LR': '1'}} failed, password: ***"


@pytest.mark.fault("a secret in the text of an error", "goes on", "nothing; it is left out of files and log")
def test_what_goes_wrong_is_written_without_secrets(joined: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = joined()
    run.hooks._worth_writing = True
    runtime.report("x", ValueError(f"api_key={SECRET}"))
    subject = Subject(step=1, role="actor", stage="a", rank=0)
    Capture(run, subject, run.settings, TorchTool()).fail(f"token={SECRET}")
    written = [path.read_text() for path in run.rundir.path.rglob("*.json*")]
    assert len(written) == 3  # run.json as well
    assert sum("***" in text for text in written) == 2
    assert not any(SECRET in text for text in written)


# A cut at 80 characters would divide this password and remove the `@` after it, by which it is recognized.
LONG_URL = f"s3//x://user:{'hunter2' * 12}@host"


@pytest.mark.parametrize(("name", "value"), [("collect", LONG_URL), ("steps", f"token={SECRET}"), ("mode", LONG_URL)])
def test_the_error_of_a_setting_has_no_secret(name: str, value: object) -> None:
    with pytest.raises(SettingsError) as raised:
        check(name, value, f"AUTOPROF_{name.upper()}")
    assert "hunter2" not in str(raised.value)
    assert "***" in str(raised.value)


def test_the_error_of_a_condition_has_no_secret() -> None:
    with pytest.raises(SettingsError) as raised:
        check_condition(f"token={SECRET}", "[[when]]")
    assert SECRET not in str(raised.value)


def test_a_refused_request_is_written_without_secrets(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    requests.refuse(run, "x.json", ValueError(f"unknown field api_key={SECRET}"))
    written = [path.read_text() for path in run.control.rglob("*") if path.is_file()]
    assert written
    assert not any(SECRET in text for text in written)


def test_a_line_that_says_why_autoprof_is_off_has_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    _boot._write_to_stderr(f"AUTOPROF_COLLECT: got 's3://user:{SECRET}@host'")
    assert capsys.readouterr().err == "autoprof: AUTOPROF_COLLECT: got 's3://***@host'\n"


def test_the_name_of_a_multiprocessing_process_has_no_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(journal.files, "text", lambda *_: "python\0--multiprocessing-fork\0")
    monkeypatch.setattr(multiprocessing.current_process(), "name", f"worker token={SECRET}")
    assert journal.process_title() == "worker token=***"


@pytest.mark.parametrize(
    ("words", "title"),
    [
        (["ray::Worker.run (idle)"], "ray::Worker.run (idle)"),
        (["worker 'first'"], "worker 'first'"),
        (["python", "train.py", "a b"], "python train.py 'a b'"),
        (["python", "-c", "x" * 300], f"python -c {'x' * 190}..."),
    ],
)
def test_the_title_of_a_process_has_all_its_quotes(
    monkeypatch: pytest.MonkeyPatch, words: list[str], title: str
) -> None:
    monkeypatch.setattr(journal.files, "text", lambda *_: "\0".join(words) + "\0" * 9)
    assert journal.process_title() == title


def test_the_error_of_an_upload_has_no_secret_at_its_end() -> None:
    def fail() -> None:
        raise OSError(f"{'x' * 170} https://user:{'hunter2' * 9}@host")

    result, problem = upload._call_fsspec(fail)
    assert result is None
    assert problem.startswith("OSError: xxx")
    assert "hunter2" not in problem


@pytest.mark.parametrize("as_json", [True, False])
def test_doctor_shows_no_secret(as_json: bool, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    text = f"token={SECRET}"
    report = Report(subject="run", facts={"a": text}, hooks=[("a/b", "failed", text)], problems=[text])
    monkeypatch.setattr("autoprof.cli.doctor.examine_run", lambda _: report)
    monkeypatch.setattr(doctor.arguments, "find_run", lambda _: None)
    doctor.run(argparse.Namespace(name="run", json=as_json, all=True))
    shown = capsys.readouterr().out
    assert SECRET not in shown
    assert shown.count("***") == 3


def test_a_line_of_the_log_is_one_line_that_a_terminal_only_shows(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("warning")
    log.warning(f"a\nb \x1b[31mred\x07 \u202eltr token={SECRET}")
    assert capsys.readouterr().err == "autoprof: a b \\x1b[31mred\\x07 \\u202eltr token=***\n"


def test_the_lines_of_an_error_are_searched_before_the_log_joins_them(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("warning")
    log.warning(f"1 error\napi_key\n  Bad [type=x, input_value='{SECRET}', input_type=str]")
    assert capsys.readouterr().err == ("autoprof: 1 error api_key   Bad [type=x, input_value='***', input_type=str]\n")


def test_a_text_that_can_be_shown_is_shown_as_it_is() -> None:
    assert plain("Größe 数据 😀 [red] \\x") == "Größe 数据 😀 [red] \\x"


@pytest.mark.parametrize("terminal", [True, False])
def test_tables_show_names_and_obey_none(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "rich.console.Console", lambda **_: Console(force_terminal=terminal, width=200, color_system=None)
    )
    console.show(["capture"], [["[red]a[/red] \\[bold]b \x1b[2J\n"], ["[/nothing]"]])
    shown = capsys.readouterr().out
    assert "[red]a[/red] \\[bold]b \\x1b[2J\\n" in shown
    assert "[/nothing]" in shown


def test_doctor_shows_names_and_obeys_none(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.show(Report(subject="\x1b[2J", facts={"a\r": "b\x1b]0;x\x07"}, problems=["\x1b[31m[red]"]))
    assert not set("\x1b\r\x07") & set(capsys.readouterr().out)


@pytest.mark.parametrize(
    "path", ["__class__.__init__.__globals__", "__dict__", "step.__globals__", "__class__.__subclasses__", "__code__"]
)
def test_a_path_of_a_recipe_reads_nothing_of_pythons_own(path: str) -> None:
    with pytest.raises(LookupError, match="is a special name of Python"):
        behaviour.follow(SimpleNamespace(step=lambda: None), path, default=1)


def test_a_path_reads_and_never_calls() -> None:
    called: list[int] = []
    root = SimpleNamespace(state=SimpleNamespace(boom=lambda: called.append(1)), name="x")
    assert behaviour.follow(root, "state.boom") is root.state.boom
    with pytest.raises(LookupError):
        behaviour.follow(root, "state.boom()")
    assert behaviour.follow(root, "__class__.__name__") == "SimpleNamespace"
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
    return [name for name, became in requests.states(run).items() if became.state == "refused" and became.reason]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.make(made.control)
    return made


@pytest.mark.fault("a request in control/ that is none", "goes on", "the request; refused and named")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_request_that_is_none_is_refused_and_named(run: RunDir, name: str, caplog: pytest.LogCaptureFixture) -> None:
    (run.control / f"{name}.json").write_bytes(HOSTILE[name])
    windows = OpenTriggers()
    windows.look(run, 1)
    assert not windows.any_to_come
    assert refused(run) == [f"{name}.json"]


def test_requests_that_are_no_files_of_the_users_are_refused_at_once(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "good.json").write_text(json.dumps({"run": "run"}))
    os.mkfifo(run.control / "pipe.json")
    (run.control / "link.json").symlink_to(tmp_path / "good.json")
    (run.control / "folder.json").mkdir()
    (run.control / "new\nline\x1b[2J.json").write_bytes(b"x")
    assert requests.take(run, requests.names(run)) == []
    assert len(refused(run)) == 4


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
def test_a_request_of_another_user_is_refused(run: RunDir) -> None:
    path = run.control / "theirs.json"
    path.write_text(json.dumps({"run": "run"}))
    os.chown(path, 12345, -1)
    assert requests.take(run, requests.names(run)) == []
    assert refused(run) == ["theirs.json"]
    # A disk that maps root to another owner also does so for the run.
    layout.write_json(path, {"run": "run"})
    os.chown(path, 12345, -1)
    os.chown(run.path, 12345, -1)
    assert len(requests.take(run, requests.names(run))) == 1


# Words that the expressions search for, and beginnings of such words.
PIECES = [
    *("token", "secret", "api_key", "API-KEY", "authorization", "password", "credentials", "key", "wandb"),
    *("=", ":", " = ", '"', "'", " ", "\n", ",", ".", "-", "_", "/", "@", "://", "{", "}", "s3://", "a", "1"),
    *("bearer ", "Basic ", "hf_", "sk-", "ghp_", "AKIA", "xoxb-", "eyJ", "-eyJ", "abcdefgh", "ABCDEFGH12345678", "a.b"),
]


# Further words that the search for names recognizes.
NAMED = [
    *("pass", "auth", "pat", "sig", "keys", "tokens", "hf", "--", "-u", "login", "value", "name", "cookie: ", "is"),
    *("==", "***", "\\", '\\"', "('", "')", "[", "]", "(", ")", "b'", "`", "<", ">", "&", "?", "%3D", "@", "#"),
    *("hunter2hunter2",),
    *("SECRET", "key=", "token: ", "'api_key', '", "s.", "Q~", ":AA", "/bot", "AIza", "eyJ"),
    *("curl ", "mysql ", "login ", "wandb ", "-p", "-b ", "-c '", "Command '", "it's ", "HF_TOKEN=", " | "),
    *("input_value=", "api_key\n  ", "'loc'", "'input': '", "logprob"),
]
# The end of these texts decides if the beginning is a secret. A cut text may lack it.
DECIDED_AT_THE_END = ["Value '", " of type ", "full_key: key", "header value: ", "'\"'\"'"]
texts = st.lists(st.sampled_from([*PIECES, *NAMED]), max_size=20).map("".join)


@given(st.lists(st.sampled_from([*PIECES, *NAMED, *DECIDED_AT_THE_END]), max_size=20).map("".join))
def test_hiding_twice_hides_no_more(text: str) -> None:
    once = hidden(text)
    assert hidden(once) == once


@given(st.text(), st.integers(0, 50))
def test_any_text_can_be_searched(text: str, most: int) -> None:
    assert isinstance(hidden(text, most), str)
    assert isinstance(redacted([text, text]), str)
    assert isinstance(hidden_in({text: [text]})[text], list)


@given(st.lists(st.sampled_from(["step", "rank0", "=", ":", " ", ",", "'", '"', "(", ")", "/", "-", ".", "12", "\n"])))
def test_a_text_without_the_word_of_a_secret_stays(words: list[str]) -> None:
    assert hidden("".join(words)) == "".join(words)


@given(texts, st.integers(0, 200))
def test_a_text_that_is_cut_holds_nothing_that_the_whole_one_hides(text: str, most: int) -> None:
    shown = hidden(text, most)
    if len(text) <= most:
        assert shown == hidden(text)
        return
    kept, _, note = shown.rpartition("... (")
    assert note == f"{len(text) - most} more characters)" or int(note.split()[0]) > len(text) - most
    whole = hidden(text, len(text))
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(kept, whole, strict=False)))
    # After the first difference, the cut text is hidden or has only quotes and brackets.
    assert kept[same : same + 1] == "*" or not re.search(r"\w", kept[same:]), (kept, whole)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Counting]]:
    """Replace the expressions of redaction by counting ones."""

    def count(steps: bool = True) -> dict[str, Counting]:
        made: dict[str, Counting] = {}

        def compiled(pattern: str) -> Counting:
            if pattern not in made:
                made[pattern] = Counting(re.compile(pattern), steps)
            return made[pattern]

        for module in (redact, named_secrets):
            monkeypatch.setattr(module, "compiled", compiled)
        return made

    return count


# An expression that starts again at each character and reads to the end needs more than half of the text.
A_FEW = 75
LONG = 200
# An expression that starts again only at each part of a long word needs a longer text.
LONGER = {"-eyJabcdefgh": 3000, ":eyJabcdefgh.abcdefgh-": 3000}


HOSTILE_TEXTS = [
    *('token="', "token  ", "://a", "://a:b", "://a@", "key=/", "key=a ", "key='a b ", 'key=\\"a b ', "key=key"),
    *("key=[a,", "key=a,", "token key ", "-u a:", "--key a ", "token=a,a", "'key', '", "(token, ", "cookie: a"),
    *("token is ", "token=f('", "<key>", "key\\", "key.", "Key", "KEY", "key\\\\", "authorization: a ", "value: "),
    *("'--key=a ", "M-", "s.", "eyJhcGlf", "/bot1", "aQ~", "1:AA", "-----BEGIN PRIVATE KEY-----", "-----BEGIN "),
    *("hooks.slack.com/services/", "services/T0/B0/", "triggers/T0/1/", "discord.com/api/webhooks/"),
    *("webhooks/12345/", "webhookb2/a@", "webhook/IncomingWebhook", "bot/hook/", "netloc='", "curl -u "),
    *("curl -sSu a:b ", "mysql -pa'", "login -p '", "wandb login a ", "mysqlmysql", "login \\\n", "--password=it's "),
    *("--password=it's", "key='it's ", "key='a'\"'\"'", "key=a'a", "'key=a'\\''", "-c 'key=a ", "--key -a1b2c3d4 "),
    *("--key --a", "api_key\n input_value=", "Value 'a' ", "loc 'input': ", "header value ' ", "token='a' logprob "),
    *("/bot12345%3Aa", "xoxb-", "AKIA1", "hf_a", "glpat-.", "SG.a", "%3D"),
]


@pytest.mark.fault("an error, or an argument, that is endless", "goes on", "the end of the text")
@pytest.mark.parametrize("piece", [*PIECES, *NAMED, *DECIDED_AT_THE_END, *LONGER, *HOSTILE_TEXTS])
def test_the_steps_of_a_search_grow_with_the_text_and_no_faster(counted: Any, piece: str) -> None:
    for tail in ("", "=", "."):
        size = LONG if tail else LONGER.get(piece, LONG)
        text = (piece * size)[:size] + tail
        patterns = counted()
        redacted([text, f"--{text}=x"])  # which hides in both what `hidden` does
        assert max(pattern.steps / len(text) for pattern in patterns.values()) < A_FEW


@settings(max_examples=30)
@given(
    unit=st.lists(st.sampled_from([*PIECES, *NAMED, *DECIDED_AT_THE_END, *HOSTILE_TEXTS]), min_size=1, max_size=5).map(
        "".join
    )
)
def test_the_steps_grow_so_whatever_is_repeated(counted: Any, unit: str) -> None:
    text = (unit * LONG)[:LONG]
    patterns = counted()
    hidden(text)
    assert max(pattern.steps / len(text) for pattern in patterns.values()) < A_FEW


@pytest.mark.parametrize("size", [100_000, 10_000_000])
@pytest.mark.parametrize("piece", ["a", "token ", "-eyJabcdefgh"])
def test_of_a_text_of_any_size_as_much_is_searched(counted: Any, piece: str, size: int) -> None:
    text = (piece * size)[:size]
    for search in (hidden, lambda text: redacted([text, "more"]), lambda text: redacted([text[:50]] * (size // 50))):
        patterns = counted(steps=False)
        assert len(search(text)) < 2 * redact._MAX_CHARS
        assert max(pattern.searched for pattern in patterns.values()) < 4 * redact._MAX_CHARS


def test_a_text_that_is_too_long_says_how_much_was_left_out() -> None:
    assert hidden("one two three", 7) == "one ... (9 more characters)"
    assert hidden(f"password='{SECRET} {SECRET}'", 20) == "password='***... (30 more characters)"
    assert hidden(f"at s3://{SECRET},{SECRET}@host", 30).startswith("at ... (")
    assert redacted(["train", *["x" * 100] * 1000]).endswith(" more arguments)")
