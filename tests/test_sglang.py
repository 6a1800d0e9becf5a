"""What is sent to each release of SGLang, and what becomes of it. The engines are made up; real ones are driven in
tests/engines."""

from __future__ import annotations

import ast
import asyncio
import itertools
import json
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from pytest_mock import MockerFixture

from autoprof import listing, runtime
from autoprof.behaviours import sglang, sglang_scheduler, sglang_session
from autoprof.behaviours.sglang_arguments import ITERATIONS, Takes, fields_of, plan, probe
from autoprof.behaviours.sglang_scheduler import FOLDER_ENDING
from autoprof.behaviours.vllm import Request
from autoprof.rundir import RunDir
from autoprof.settings import Settings
from autoprof.wrapping import CALL, Call, Outcome, Reply

# What start_profile takes in each release: its parameters, from 0.5.15 on the fields of ProfileReq.
_0_4_6 = frozenset({"output_dir", "num_steps", "activities", "with_stack", "record_shapes"})
_0_4_7 = _0_4_6 | {"profile_by_stage"}
_0_4_9 = _0_4_7 | {"start_step"}
_0_5_5 = _0_4_9 | {"merge_profiles"}
_0_5_8 = _0_5_5 | {"profile_prefix", "profile_stages"}
_0_5_15 = _0_5_8 | {"profile_id", "req_type"}
RELEASES = {
    "0.4.6.post5": _0_4_6,
    "0.4.7": _0_4_7,
    "0.4.9.post2": _0_4_9,
    "0.5.5": _0_5_5,
    "0.5.8": _0_5_8,
    "0.5.12": _0_5_8,
    "0.5.15": _0_5_15,
    "0.5.23": _0_5_15 | {"detailed_annotations"},
}
CPU, CUDA = ("cpu",), ("cpu", "cuda")


def takes(release: str = "0.5.23", **more: Any) -> Takes:
    return Takes(arguments=RELEASES[release], **({"devices": CUDA, "stack": True} | more))


@pytest.mark.parametrize(
    ("contents", "iterations", "sent"),
    [
        ((), "0:100", {"activities": ["CPU", "GPU"], "start_step": 1, "num_steps": 100}),
        ((), "0:1", {"activities": ["CPU", "GPU"], "start_step": 1, "num_steps": 1}),
        (("cpu",), ":1", {"activities": ["CPU"], "start_step": 1, "num_steps": 1}),
        (("cuda",), "0:100", {"activities": ["GPU"], "start_step": 1, "num_steps": 100}),
        (("cuda", "cpu", "shapes"), "5:7", {"record_shapes": True, "start_step": 6, "num_steps": 2}),
        (("cpu", "stack"), "all", {"activities": ["CPU"], "with_stack": True}),
        (("profile-by-stage",), "0:1", {"profile_by_stage": True, "num_steps": 1}),
        (
            ("cpu", "stack", "shapes", "profile-by-stage"),
            "0:100",
            {
                "activities": ["CPU"],
                "with_stack": True,
                "record_shapes": True,
                "profile_by_stage": True,
                "num_steps": 100,
            },
        ),
        # Autoprof merges what is there; SGLang merges only where it is asked for by name.
        (("cpu", "merge-profiles"), "0:1", {"activities": ["CPU"], "start_step": 1, "num_steps": 1}),
        (
            ("cpu", "merge-profiles", "sglang-merge-profiles"),
            "0:1",
            {"activities": ["CPU"], "start_step": 1, "num_steps": 1, "merge_profiles": True},
        ),
    ],
)
def test_what_is_sent(contents: tuple[str, ...], iterations: str, sent: dict[str, Any]) -> None:
    off = {"with_stack": False, "record_shapes": False}
    activities = {"activities": ["CPU", "GPU"]}
    found = plan(contents, iterations, takes())
    assert found.arguments == activities | off | sent
    assert found.left_out == {}
    assert set(found.contents) >= set(contents)


@pytest.mark.parametrize("release", RELEASES)
def test_every_mixture_is_safe_to_send(release: str) -> None:
    words = ("profile-by-stage", "merge-profiles", "sglang-merge-profiles", "stack", "shapes", "memory")
    chosen = [tuple(itertools.compress(words, flags)) for flags in itertools.product((0, 1), repeat=len(words))]
    devices: list[tuple[str, ...]] = [(), ("cpu",), ("cuda",), ("cpu", "cuda"), ("npu",)]
    windows = ["0:100", "0:1", ":1", "1:2", "3:100", "all"]
    builds: list[dict[str, Any]] = [{"devices": CPU, "memory": False}, {"devices": CUDA, "memory": True}]
    places: list[dict[str, Any]] = [{}, {"one_node": False}, {"disaggregated": True}, {"stack": False}]
    for some, others, window, build, place in itertools.product(devices, chosen, windows, builds, places):
        known = takes(release, **(build | place))
        arguments, contents, left_out = plan(some + others, window, known)
        assert set(arguments) <= known.arguments
        # What ends the server: nothing to record, an activity that the build lacks, stages without a count.
        assert set(arguments["activities"]) <= ({"CPU"} if build["devices"] == CPU else {"CPU", "GPU", "MEM"})
        assert set(arguments["activities"]) & {"CPU", "GPU"}
        if arguments.get("profile_by_stage"):
            assert arguments["num_steps"] > 0
            assert "start_step" not in arguments
            assert known.one_node
            assert not known.disaggregated
        # SGLang has these on where nothing is said.
        assert isinstance(arguments["with_stack"], bool)
        assert isinstance(arguments["record_shapes"], bool)
        assert arguments.get("num_steps", 1) > 0
        # What is armed can be disarmed where autoprof is.
        assert "start_step" not in arguments or known.one_node
        assert arguments.get("merge_profiles", False) == ("sglang-merge-profiles" in contents)
        # SGLang's merger does not find the traces then (0.5.8 and 0.5.23).
        assert "profile_prefix" not in arguments
        # Every word is either recorded or said to be left out.
        assert set(some + others) <= set(contents) | set(left_out)
        assert not set(contents) & set(left_out)


@pytest.mark.parametrize(
    ("release", "place", "window", "sent", "left_out"),
    [
        ("0.5.23", {}, "2:5", {"start_step": 3, "num_steps": 3}, set()),
        ("0.4.9.post2", {}, "2:5", {"start_step": 3, "num_steps": 3}, set()),
        ("0.4.7", {}, "2:5", {"num_steps": 6}, {ITERATIONS}),
        ("0.4.7", {}, "all", {}, set()),
        ("0.4.6.post5", {}, "0:5", {}, {ITERATIONS}),
        ("0.5.23", {"one_node": False}, "2:5", {"num_steps": 6}, {ITERATIONS}),
    ],
)
def test_windows_by_what_the_release_takes(
    release: str, place: dict[str, Any], window: str, sent: dict[str, Any], left_out: set[str]
) -> None:
    found = plan((), window, takes(release, **place))
    assert {name: found.arguments[name] for name in ("start_step", "num_steps") if name in found.arguments} == sent
    assert set(found.left_out) == left_out


@pytest.mark.parametrize(
    ("release", "place", "window"),
    [
        ("0.4.6.post5", {}, "0:3"),
        ("0.5.23", {}, "all"),
        ("0.5.23", {}, "1:3"),
        ("0.5.23", {"one_node": False}, "0:3"),
        ("0.5.23", {"disaggregated": True}, "0:3"),
    ],
)
def test_stages_are_left_out_where_they_are_not_safe(release: str, place: dict[str, Any], window: str) -> None:
    found = plan(("profile-by-stage",), window, takes(release, **place))
    assert "profile_by_stage" not in found.arguments
    assert "profile-by-stage" in found.left_out


def test_sglangs_own_variables_are_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PROFILE_RECORD_SHAPES", "false")
    found = plan(("shapes",), "all", takes())
    assert (found.arguments["record_shapes"], list(found.left_out)) == (False, ["shapes"])


@dataclass
class OldRequest:
    type: Any
    output_dir: str | None = None
    start_step: int | None = None


class NewRequest(msgspec.Struct, kw_only=True):
    req_type: Any
    output_dir: str | None = None
    start_step: int | None = None


def test_fields_are_those_of_dataclasses_and_of_structs() -> None:
    assert fields_of(OldRequest) == ["type", "output_dir", "start_step"]
    assert fields_of(NewRequest) == ["req_type", "output_dir", "start_step"]


# The scheduler.

START, STOP = SimpleNamespace(name="START_PROFILE"), SimpleNamespace(name="STOP_PROFILE")
OURS = f"/run/global_step_000001/rollout{FOLDER_ENDING}"


@dataclass
class Holder:
    """What holds the profiler in SGLang's scheduler."""

    forward_ct: int = 40
    profile_in_progress: bool = False
    profile_by_stage: bool = False
    profiler_start_forward_ct: int | None = None
    profiler_target_forward_ct: int | None = None
    profiler_prefill_ct: int | None = None
    profiler_decode_ct: int | None = None


def receive(holder: Any, request: Any) -> Any:
    """Pass a request through the hook; returns autoprof's reply, or None where SGLang's own method was called."""

    def profile(self: Any, recv_req: Any) -> None:
        raise NotImplementedError

    around = sglang_scheduler.Scheduler().around(Call("sglang/scheduler", profile, (holder, request), {}))
    try:
        assert next(around) is CALL
    except StopIteration as stop:
        return stop.value
    with pytest.raises(StopIteration):
        around.send(Outcome(None, None))
    return None


@pytest.fixture
def _no_sglang(mocker: MockerFixture) -> None:
    mocker.patch.object(sglang_scheduler, "_refusal", side_effect=lambda why: why)


def test_passes_are_counted_from_the_schedulers_own_number() -> None:
    request = NewRequest(req_type=START, output_dir=OURS, start_step=3)
    asked = SimpleNamespace(get_forward_ct=lambda: 7, profile_in_progress=False)
    receive(asked, request)
    assert request.start_step == 10
    old = OldRequest(type=START, output_dir=OURS, start_step=1)
    receive(Holder(), old)
    assert old.start_step == 41
    whole = OldRequest(type=START, output_dir=OURS)
    receive(Holder(), whole)
    assert whole.start_step is None


@pytest.mark.parametrize("folder", [None, "/tmp", "/run/global_step_000001"])
def test_somebody_elses_requests_pass_unchanged(folder: str | None) -> None:
    holder = Holder(profile_in_progress=True, profiler_start_forward_ct=99)
    request = OldRequest(type=START, output_dir=folder, start_step=3)
    assert receive(holder, request) is None
    assert request.start_step == 3
    assert receive(holder, OldRequest(type=STOP)) is None
    assert holder.profiler_start_forward_ct == 99


@pytest.mark.usefixtures("_no_sglang")
@pytest.mark.parametrize(
    "holder",
    [
        Holder(profile_in_progress=True),
        Holder(profiler_start_forward_ct=41),
        Holder(profile_by_stage=True, profiler_prefill_ct=0, profiler_decode_ct=0),
        Holder(profile_by_stage=True, profiler_prefill_ct=2, profiler_decode_ct=0),
        SimpleNamespace(forward_ct=1, profiler_activities=["CPU"]),  # 0.4.6
    ],
)
def test_nothing_starts_in_what_somebody_else_has_open_or_armed(holder: Any) -> None:
    assert isinstance(receive(holder, OldRequest(type=START, output_dir=OURS)), Reply)


@pytest.mark.parametrize(
    "holder",
    [
        Holder(),
        Holder(profiler_start_forward_ct=40),
        Holder(profile_by_stage=True, profiler_prefill_ct=2, profiler_decode_ct=3),
        SimpleNamespace(forward_ct=1, profiler_activities=None),
    ],
)
def test_what_is_over_is_in_nobodys_way(holder: Any) -> None:
    assert receive(holder, OldRequest(type=START, output_dir=OURS)) is None


def test_a_stop_disarms_what_autoprof_armed() -> None:
    holder = Holder()
    receive(holder, OldRequest(type=START, output_dir=OURS, start_step=1))
    holder.profiler_start_forward_ct, holder.profiler_target_forward_ct, holder.profile_by_stage = 41, 44, True
    receive(holder, OldRequest(type=STOP))
    assert holder == Holder()


# The server's process.


@dataclass
class Manager:
    """A TokenizerManager whose engine leaves `leaves` at the stop, and fails or hangs as it is told to."""

    leaves: list[str] = field(default_factory=lambda: ["1700000000.5-TP-0.trace.json.gz"])
    fails: dict[str, Exception] = field(default_factory=dict)
    hangs_s: dict[str, float] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    server_args: Any = field(default_factory=lambda: SimpleNamespace(tp_size=2, sleep_on_idle=True, nnodes=1))
    sent: dict[str, Any] = field(default_factory=dict)

    async def start_profile(
        self,
        output_dir: str | None = None,
        start_step: int | None = None,
        num_steps: int | None = None,
        activities: list[str] | None = None,
        with_stack: bool | None = None,
        record_shapes: bool | None = None,
    ) -> None:
        self.sent = {"output_dir": output_dir, "start_step": start_step, "num_steps": num_steps}
        await self._answer("start")

    async def stop_profile(self) -> None:
        await self._answer("stop")
        for name in self.leaves:
            Path(self.sent["output_dir"], name).write_bytes(b"trace")

    async def _answer(self, action: str) -> None:
        self.calls.append(action)
        await asyncio.sleep(self.hangs_s.get(action, 0))
        if action in self.fails:
            raise self.fails[action]


@pytest.fixture
def run(mocker: MockerFixture, tmp_path: Path) -> Any:
    made = SimpleNamespace(
        settings=Settings(rollout_iterations="0:3"),
        rundir=RunDir(tmp_path / "run"),
        hooks=SimpleNamespace(versions=lambda: {}, error=lambda *_: None),
    )
    mocker.patch.object(runtime, "current", return_value=made)
    mocker.patch.object(sglang, "_unfit", return_value="")
    return made


REQUEST = Request(action="start", step=3, replica=2, rank=4)


def metas(run: Any) -> dict[str, dict[str, Any]]:
    """The meta files of step 3 by the engine's rank part."""
    paths = run.rundir.step(3).glob("*.meta.json")
    return {path.name.split(".")[2]: json.loads(path.read_text()) for path in paths}


def drive(manager: Manager, cut: str = "") -> list[dict[str, Any]]:
    async def both() -> list[dict[str, Any]]:
        return [await sglang.start(manager, REQUEST), await sglang.stop(manager, cut)]

    return asyncio.run(both())


def test_files_get_their_names_at_the_stop(run: Any) -> None:
    ranks = ["TP-0-PP-0", "TP-1-PP-0", "TP-0-PP-1", "TP-1-PP-1-EP-1-DECODE", "TP-1-DP-3"]
    manager = Manager([f"1700000000.5-{part}.trace.json.gz" for part in ranks] + ["1700000000.6-TP-0-memory.pickle"])
    assert drive(manager) == [{"problem": ""}, {"problem": ""}]
    assert (manager.sent["start_step"], manager.sent["num_steps"]) == (1, 3)
    found = metas(run)
    assert {part: meta["rank"] for part, meta in found.items()} == {
        "TP-0-PP-0": 4,
        "TP-1-PP-0": 5,
        "TP-0-PP-1": 6,
        "TP-1-PP-1-EP-1-DECODE": 7,
        "TP-1-DP-3": 5,
        "TP-0-memory": 4,
    }
    assert {(meta["state"], meta["bytes"], meta["replica"]) for meta in found.values()} == {("complete", 5, 2)}
    endings = sorted("".join(path.suffixes[-4:]) for path in run.rundir.step(3).iterdir() if "meta" not in path.name)
    assert endings[-5:] == [".pt.trace.json.gz"] * 5
    assert endings[0].endswith(".pickle")
    assert list(run.rundir.parts()) == []


def test_sglangs_own_merged_trace_is_placed_beside_the_others(run: Any) -> None:
    ranks = [f"1700000000.5-TP-{rank}.trace.json.gz" for rank in (0, 1)]
    drive(Manager(["merged-1700000000.5.trace.json.gz", *ranks]))
    assert set(metas(run)) == {"TP-0", "TP-1", "sglang-merged"}
    (step,) = listing.read(run.rundir.path).steps
    assert [capture.name.split(".")[2] for capture in step.captures] == ["TP-0", "TP-1"]
    assert [capture.state for capture in step.merged] == ["complete"]
    assert list(run.rundir.parts()) == []


@pytest.mark.parametrize("stages", [("1", "2"), ("ForwardMode.EXTEND", "ForwardMode.DECODE"), ("EXTEND", "DECODE")])
def test_stages_are_named_alike_in_every_release(run: Any, stages: tuple[str, str]) -> None:
    drive(Manager([f"1700000000.5-TP-1-{stage}.trace.json.gz" for stage in stages]))
    assert set(metas(run)) == {"TP-1-EXTEND", "TP-1-DECODE"}


def test_a_stop_after_the_engine_stopped_by_itself_is_no_problem(run: Any) -> None:
    manager = Manager(leaves=[], fails={"stop": RuntimeError("Profiling is not in progress.")})

    async def scenario() -> dict[str, Any]:
        await sglang.start(manager, REQUEST)
        Path(manager.sent["output_dir"], "1.5-TP-0.trace.json.gz").write_bytes(b"trace")
        return await sglang.stop(manager)

    assert asyncio.run(scenario()) == {"problem": ""}
    assert metas(run)["TP-0"]["state"] == "complete"


def test_a_start_that_did_nothing_is_noticed(run: Any) -> None:
    started, stopped = drive(Manager(leaves=[]))
    assert started == {"problem": ""}
    assert "recorded nothing" in stopped["problem"]
    assert metas(run)["TP-0"]["state"] == "failed"


def test_a_start_that_fails_leaves_nothing(run: Any) -> None:
    manager = Manager(fails={"start": RuntimeError("no")})
    assert drive(manager) == [{"problem": "RuntimeError: no"}, {"problem": "it was not recording"}]
    assert manager.calls == ["start"]
    assert not run.rundir.step(3).exists()


def test_a_recording_that_never_ended_is_listed_as_unfinished(run: Any) -> None:
    asyncio.run(sglang.start(Manager(), REQUEST))
    (unfinished,) = listing.read(run.rundir.path).captures
    assert unfinished.state == listing.UNFINISHED
    assert unfinished.name.startswith("rollout.replica2.")


def test_a_recording_that_is_cut_says_so(run: Any) -> None:
    drive(Manager(), "somebody came")
    assert (metas(run)["TP-0"]["state"], metas(run)["TP-0"]["reason"]) == ("truncated", "somebody came")


def test_a_stop_that_takes_too_long_is_not_waited_for_and_its_files_come_later(run: Any) -> None:
    run.settings = msgspec.structs.replace(run.settings, stop_timeout_s=0.05)
    manager = Manager(hangs_s={"stop": 0.3})

    async def scenario() -> list[dict[str, Any]]:
        answers = [await sglang.start(manager, REQUEST), await sglang.stop(manager)]
        assert metas(run) == {}
        answers += [await sglang.start(manager, REQUEST), await sglang.stop(manager)]
        while hasattr(manager, sglang_session.OPEN) or list(run.rundir.parts()):
            await asyncio.sleep(0.01)
        return answers

    _, late, again, stopping = asyncio.run(asyncio.wait_for(scenario(), 10))
    assert late == {"problem": "the engine did not answer within 0.05 s"}
    assert again == {"problem": "it is recording already"}
    assert stopping == {"problem": "it is being stopped already"}
    assert metas(run)["TP-0"]["state"] == "complete"
    assert manager.calls == ["start", "stop"]


def test_a_start_that_takes_too_long_is_stopped_when_it_comes(run: Any) -> None:
    run.settings = msgspec.structs.replace(run.settings, stop_timeout_s=0.05)
    manager = Manager(hangs_s={"start": 0.2})

    async def scenario() -> dict[str, Any]:
        answer = await sglang.start(manager, REQUEST)
        while hasattr(manager, sglang_session.OPEN) or not metas(run):
            await asyncio.sleep(0.01)
        return answer

    assert asyncio.run(asyncio.wait_for(scenario(), 10))["problem"] == "the engine did not answer within 0.05 s"
    assert metas(run)["TP-0"]["reason"] == "the engine started too late"
    assert manager.calls == ["start", "stop"]


def test_an_engine_without_autoprofs_hook_in_its_scheduler_is_not_driven(
    run: Any, mocker: MockerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    mocker.stopall()
    mocker.patch.object(runtime, "current", return_value=run)
    manager = Manager()
    answers = drive(manager)
    assert "hook in SGLang's scheduler" in answers[0]["problem"]
    monkeypatch.setenv("SGLANG_PROFILE_V2", "1")
    assert "SGLANG_PROFILE_V2" in drive(manager)[0]["problem"]
    assert manager.calls == []


def test_stacks_need_a_server_that_sleeps_when_idle(run: Any) -> None:
    manager = Manager()
    assert probe(manager).stack
    manager.server_args.sleep_on_idle = False
    assert not probe(manager).stack
    found = plan(("stack",), "all", probe(manager))
    assert (found.arguments["with_stack"], list(found.left_out)) == (False, ["stack"])


def ask(instance: Any, **keywords: Any) -> Any:
    """Call the hooked method of a server actor; what is waited for is answered with `waited`."""
    around = sglang.Server().around(Call("verl/sglang-server", lambda: None, (instance,), keywords))
    try:
        waits = next(around)
        assert waits is not None
        around.send(asyncio.run(waits.suspend()))
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it went on")


def test_the_server_passes_the_trainers_requests_on(run: Any) -> None:
    server = SimpleNamespace(tokenizer_manager=Manager(), node_rank=0)
    asked = {"step": 3, "replica": 2, "rank": 4}
    assert ask(server, autoprof={"action": "start", **asked}) == Reply({"problem": ""})
    assert ask(server, autoprof={"action": "stop", **asked}) == Reply({"problem": ""})
    assert ask(server, autoprof={"action": "stop", **asked}) == Reply({"problem": "it was not recording"})
    assert "ValidationError" in ask(server, autoprof={"action": "start"}).value["problem"]


@pytest.mark.parametrize(
    "server",
    [
        SimpleNamespace(tokenizer_manager=None, node_rank=0),
        SimpleNamespace(node_rank=0),
        SimpleNamespace(tokenizer_manager=Manager(), node_rank=1),
    ],
)
def test_servers_without_an_engine_have_nothing_to_do(run: Any, server: Any) -> None:
    assert ask(server, autoprof={"action": "start", "step": 3, "replica": 2, "rank": 4}) == Reply({})


def test_verls_server_is_what_the_hook_takes_it_for() -> None:
    verl = find_spec("verl")
    assert verl is not None
    assert verl.origin is not None
    path = Path(verl.origin).parent / "workers" / "rollout" / "sglang_rollout" / "async_sglang_server.py"
    (server,) = (
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "SGLangHttpServer"
    )
    methods = {node.name: node for node in server.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    start = methods["start_profile"]
    assert isinstance(start, ast.AsyncFunctionDef)
    assert start.args.kwarg is not None
    text = ast.unparse(server)
    assert "self.tokenizer_manager" in text
    assert "self.node_rank = node_rank" in text
