"""Records of exceptions. Exceptions of Ray and torchrun are real ones."""

from __future__ import annotations

import re
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from autoprof.run import raised


def caught(function) -> BaseException:
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError


def test_type_text_and_stack() -> None:
    def fetch_score():
        password = "hunter2hunter2"  # noqa: F841  no value is told
        raise ValueError("refused: token=abcdefgh, after 3 tries")

    found = raised.read_exception(caught(fetch_score))
    assert (found.type, found.message) == ("ValueError", "refused: token=***, after 3 tries")
    assert [frame.function.rpartition(".")[2] for frame in found.frames] == ["caught", "fetch_score"]
    assert found.frames[-1].file == __file__
    assert "hunter2" not in repr(found)


def test_it_is_bounded() -> None:
    def deep(left):
        return deep(left - 1) if left else 1 / 0

    assert len(raised.read_exception(caught(lambda: deep(500))).frames) == 30
    assert len(raised.read_exception(ValueError("x y " * 100_000)).message) < 1100


TRACEBACK = """Traceback (most recent call last):
  File "/home/u/main.py", line 3, in run
    fit()
  File "/home/u/reward.py", line 44, in fetch_score
    raise ValueError("no score")
ValueError: no score
"""


def test_an_exception_that_ray_brings_is_told_as_it_was_raised() -> None:
    exceptions = pytest.importorskip("ray.exceptions")
    error = exceptions.RayTaskError("run", TRACEBACK, ValueError("no score"), "ray::TaskRunner.run", 7, "10.0.0.2")
    for each in (error, error.as_instanceof_cause()):
        found = raised.read_exception(each)
        assert (found.type, found.message, found.pid, found.named) == ("ValueError", "no score", 7, [])
        assert [(frame.line, frame.function) for frame in found.frames] == [(3, "run"), (44, "fetch_score")]


def test_of_one_that_two_tasks_brought_the_innermost_is_told() -> None:
    exceptions = pytest.importorskip("ray.exceptions")
    error = exceptions.RayTaskError(
        "score", TRACEBACK, ValueError("no score"), "ray::RewardWorker.score", 7, "10.0.0.2"
    )
    inner = error.as_instanceof_cause()
    outer = f"""Traceback (most recent call last):
  File "/home/u/trainer.py", line 9, in step
    ray.get(score)
ray.exceptions.RayTaskError(ValueError): {inner}
"""
    brought = exceptions.RayTaskError("run", outer, inner, "ray::TaskRunner.run", 8, "10.0.0.2")
    found = raised.read_exception(brought.as_instanceof_cause())
    assert (found.type, found.message, found.pid) == ("ValueError", "no score", 7)
    assert found.frames[-1].function == "fetch_score"


def of_pydantic() -> BaseException:
    """Return pydantic's error for two wrong fields."""
    pydantic = pytest.importorskip("pydantic")
    model = pydantic.create_model("Judge", steps=(int, ...), workers=(int, ...))
    return caught(lambda: model(steps="x", workers="y"))


def of_omegaconf() -> BaseException:
    """Return OmegaConf's error for a key that a config lacks."""
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create({"actor": {"lr": 1}})
    omegaconf.OmegaConf.set_struct(config, True)
    return caught(lambda: config.actor.foo)


def of_yaml() -> BaseException:
    """Return PyYAML's error, whose lines show the file."""
    return caught(lambda: pytest.importorskip("yaml").safe_load("a: [1,\n b: c"))


def of_dynamo() -> BaseException:
    """Return an error with the text of torch.compile, which names a file without a traceback."""

    def fail() -> None:
        raise RuntimeError('Graph break\n\nfrom user code:\n   File "/u/a.py", line 3, in f\n    x()\n\nSet TORCH_LOGS')

    return caught(fail)


OF_MANY_LINES = [of_pydantic, of_omegaconf, of_yaml, of_dynamo]


@pytest.mark.parametrize("made", OF_MANY_LINES)
def test_a_text_with_indented_lines_is_kept_whole(made) -> None:
    error = made()
    found = raised.read_exception(error)
    assert found.message.splitlines() == [line for line in str(error).splitlines() if line]
    assert len(found.message.splitlines()) > 2
    assert found.cause == ""


@pytest.mark.parametrize("made", OF_MANY_LINES)
@pytest.mark.parametrize("colour", ["", "\x1b[36m"])
def test_a_text_of_many_lines_is_kept_whole_in_a_ray_task(made, colour: str) -> None:
    exceptions = pytest.importorskip("ray.exceptions")
    error = made()
    text = "".join(traceback.format_exception(error))
    told = raised.read_exception(error)
    brought = exceptions.RayTaskError("run", text, error, f"{colour}ray::TaskRunner.run()", 7, "10.0.0.2")
    for each in (brought, brought.as_instanceof_cause()):
        found = raised.read_exception(each)
        assert (found.type, found.message, found.pid) == (told.type, told.message, 7)
        assert [frame.line for frame in found.frames] == [frame.line for frame in told.frames]


# Messages of Ray 2.60 without the original exception: it could not be pickled, or an argument or the actor failed.
UNPICKLABLE = """\x1b[36mray::fail()\x1b[39m (pid=7, ip=10.0.0.2)
  File "/home/u/reward.py", line 44, in fetch_score
    raise Rejected("no score:\\n    in row 3\\nof 8")
    ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
Rejected: no score:
    in row 3
of 8"""
OF_AN_ARGUMENT = f"""\x1b[36mray::takes()\x1b[39m (pid=8, ip=10.0.0.2)
  At least one of the input arguments for this task could not be computed:
ray.exceptions.RayTaskError: {UNPICKLABLE}"""
OF_A_CAUSE = f"""ray::fail() (pid=7, ip=10.0.0.2)
  File "/home/u/reward.py", line 40, in fetch_score
    rows["x"]
KeyError: 'x'

The above exception was the direct cause of the following exception:

{UNPICKLABLE}"""
OF_AN_ACTOR = f"""The actor died because of an error raised in its creation task, {UNPICKLABLE}"""
WITH_A_LONG_REPR = UNPICKLABLE.replace("ip=10.0.0.2)", "ip=10.0.0.2, actor_id=0a, repr=Worker(\nrank=0\n))")
WITHOUT_FRAMES = "Traceback (most recent call last):\nRejected: no score:\n    in row 3\nof 8"
OF_TORCH = UNPICKLABLE.replace(
    UNPICKLABLE.splitlines()[0],
    "Caught Rejected in DataLoader worker process 1.\nOriginal Traceback (most recent call last):",
)


@pytest.mark.parametrize(
    "text", [UNPICKLABLE, OF_AN_ARGUMENT, OF_A_CAUSE, OF_AN_ACTOR, WITH_A_LONG_REPR, WITHOUT_FRAMES, OF_TORCH]
)
def test_of_a_text_with_tracebacks_the_last_exception_is_kept_whole(text: str) -> None:
    assert raised.read_exception(RuntimeError(text)).message == "Rejected: no score:\n    in row 3\nof 8"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="there are no groups")
def test_of_a_text_with_the_traceback_of_a_group_the_last_exception_is_kept() -> None:
    group = ExceptionGroup("two of two", [ValueError("a"), KeyError("b")])  # noqa: F821
    text = "".join(traceback.format_exception(caught(lambda: raised_again(group))))
    assert raised.read_exception(RuntimeError(f"failed:\n{text}")).message == "KeyError: 'b'"


def raised_again(error: BaseException) -> None:
    raise error


def test_a_type_with_its_module_is_left_out_of_the_message() -> None:
    kind = type("Rejected", (Exception,), {})
    assert (
        raised.read_exception(kind("Traceback (most recent call last):\nrewards.errors.Rejected: no score")).message
        == "no score"
    )
    assert raised.read_exception(kind("the type Rejected: no score")).message == "the type Rejected: no score"


DIED = """The actor died unexpectedly before finishing this task.
\tclass_name: WorkerDict
\tactor_id: 0123456789abcdef
\tpid: 4242
\tname: worker
\tnamespace: train
\tip: 10.0.0.2
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker
unexpectedly exits with a connection error code 2. End of file. There are some potential root causes. (1) The process is
killed by SIGKILL by OOM killer due to high memory usage. (2) ray stop --force is called. (3) The worker is crashed
unexpectedly due to SIGSEGV or other unexpected errors."""
OUT_OF_MEMORY = """Task was killed due to the node running low on memory.
Memory on the node (IP: 10.0.0.2, ID: e5d953ef) where the task (task ID: 43b5, name=generate, pid=82813, memory
used=21.99GB) was running was 27.71GB / 28.80GB (0.962273), which exceeds the memory usage threshold of 0.95. Ray killed
this worker (ID: 6f2e) because it was the most recently scheduled task."""


def test_a_dead_actor_is_named() -> None:
    exceptions = pytest.importorskip("ray.exceptions")
    error = exceptions.ActorDiedError()
    error.error_msg = DIED
    (named,) = raised.read_exception(error).named
    assert (named.pid, named.cause) == (4242, "")
    # The exception also passed through the task that waited for it.
    brought = exceptions.RayTaskError("run", TRACEBACK, error, "ray::TaskRunner.run", 7, "10.0.0.2")
    (named,) = raised.read_exception(brought.as_instanceof_cause()).named
    assert named.pid == 4242


# Messages of Ray 2.60.
KILLED_FOR_MEMORY = """1 worker(s) were killed due to the node running low on memory. Memory on the node
(IP: 10.0.0.2, ID: 22984661) was 27.71GB used / 28.80GB limit (0.962273)
OOM kill reason: Memory usage 29753900000B exceeded threshold of 29376000000B (95.0% of 30923764531B limit)
Selected to kill: (Actor(ed7775): job ID=01000000, task name=Worker.__init__, pid=82813, actual memory used=21.99GB)"""


@pytest.mark.parametrize("text", [OUT_OF_MEMORY, KILLED_FOR_MEMORY])
def test_rays_memory_monitor_is_named(text: str) -> None:
    exceptions = pytest.importorskip("ray.exceptions")
    (named,) = raised.read_exception(exceptions.OutOfMemoryError(text.replace("\n", " "))).named
    assert (named.pid, named.cause) == (82813, "memory")
    assert (named.used_bytes >> 20, named.limit_bytes >> 20) == (28375, 29491)


NODE_DIED = """Task failed because the node it was running on is dead or unavailable. Node IP: 10.0.0.2, node ID: e5d9.
This can happen if the instance where the node was running failed, the node was preempted, or raylet crashed."""


def test_a_dead_node_is_named() -> None:
    exceptions = pytest.importorskip("ray.exceptions")
    (named,) = raised.read_exception(exceptions.NodeDiedError(NODE_DIED)).named
    assert (named.pid, named.cause) == (0, "node")


def test_a_subclass_of_one_of_rays_names_the_actor_too() -> None:
    exceptions = pytest.importorskip("ray.exceptions")

    class RewardActorLost(exceptions.ActorDiedError):
        pass

    error = RewardActorLost()
    error.error_msg = DIED
    brought = exceptions.RayTaskError("run", TRACEBACK, error, "ray::TaskRunner.run", 7, "10.0.0.2")
    for each in (error, brought, brought.as_instanceof_cause()):
        assert [named.pid for named in raised.read_exception(each).named] == [4242]


def test_a_death_without_a_process_and_a_cause_names_none() -> None:
    exceptions = pytest.importorskip("ray.exceptions")
    for kind in (exceptions.WorkerCrashedError, exceptions.ActorDiedError, exceptions.RayActorError):
        assert raised.read_exception(kind()).named == []


def test_the_text_of_rays_exception_in_another_one_names_the_actor() -> None:
    (named,) = raised.read_exception(RuntimeError(f"rollout failed:\n{DIED}")).named
    assert named.pid == 4242


@pytest.mark.parametrize("name", ["ActorDiedError", "NodeDiedError", "OutOfMemoryError", "WorkerCrashedError"])
@pytest.mark.parametrize("text", ["CUDA out of memory", "the device of pid: 17 is low on memory", "the node died"])
def test_a_class_of_another_library_with_the_name_of_one_of_rays_names_none(name: str, text: str) -> None:
    exceptions = pytest.importorskip("ray.exceptions")
    error = type(name, (RuntimeError,), {})(text)
    brought = exceptions.RayTaskError("run", TRACEBACK, error, "ray::TaskRunner.run", 7, "10.0.0.2")
    for each in (error, brought, brought.as_instanceof_cause()):
        assert (raised.read_exception(each).type, raised.read_exception(each).named) == (name, [])


def test_a_killed_worker_of_a_data_loader_is_named() -> None:
    try:
        raise RuntimeError("DataLoader worker (pid(s) 42, 43) exited unexpectedly") from RuntimeError(
            "DataLoader worker (pid 42) is killed by signal: Killed. "
        )
    except RuntimeError as error:
        (named,) = raised.read_exception(error).named
    assert (named.pid, named.name, named.signal) == (42, "data loader worker", "SIGKILL")


def test_torchs_out_of_memory_names_none() -> None:
    torch = pytest.importorskip("torch")
    text = "CUDA out of memory. Process 4242 has 79 GiB in use. The GPU is running low on memory, see pid=4242."
    found = raised.read_exception(torch.OutOfMemoryError(text))
    assert (found.type, found.named) == ("OutOfMemoryError", [])


def test_torchruns_failures_are_named_the_first_one_first() -> None:
    errors = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")
    failures = {
        0: errors.ProcessFailure(local_rank=0, pid=10, exitcode=-15, error_file="none"),
        3: errors.ProcessFailure(local_rank=3, pid=13, exitcode=-9, error_file="none"),
    }
    failures[0].timestamp, failures[3].timestamp = 20, 10
    found = raised.read_exception(errors.ChildFailedError("train.py", failures))
    assert [(each.rank, each.pid, each.signal) for each in found.named] == [(3, 13, "SIGKILL"), (0, 10, "SIGTERM")]
    assert found.message.startswith("train.py FAILED")


def raised_by(text: str) -> BaseException:
    """Return an exception that was raised from another one."""
    try:
        try:
            {}["score"]
        except KeyError as origin:
            raise ValueError(text) from origin
    except ValueError as error:
        return error


def test_what_it_was_raised_from_is_told() -> None:
    assert re.fullmatch(
        r"KeyError: 'score' in test_raised.py:\d+ raised_by", raised.read_exception(raised_by("no")).cause
    )


def _score(row: int) -> int:
    return 1 // row


def test_of_another_process_the_place_is_in_the_text() -> None:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        error = caught(lambda: pool.submit(_score, 0).result())
    found = raised.read_exception(error)
    assert re.fullmatch(r"ZeroDivisionError: [a-z ]+ in test_raised.py:\d+ _score", found.cause)


def test_of_a_workers_exception_that_torch_brings_the_text_is_told_without_its_type() -> None:
    utils = pytest.importorskip("torch._utils")
    try:
        _score(0)
    except ZeroDivisionError:
        wrapped = utils.ExceptionWrapper(where="in DataLoader worker process 1")
    found = raised.read_exception(caught(wrapped.reraise))
    assert (found.type, found.message.partition(" ")[0]) == ("ZeroDivisionError", "integer")
    assert re.fullmatch(r"ZeroDivisionError: [a-z ]+ in test_raised.py:\d+ _score", found.cause)


def test_the_place_in_a_text_is_not_a_file_of_autoprof() -> None:
    error = RuntimeError("a worker failed")
    own = f'  File "{raised.__file__}", line 30, in drive\n    return function()\n'
    error.__cause__ = ValueError(TRACEBACK.replace("\nValueError", f"\n{own}ValueError"))
    assert raised.read_exception(error).cause == "ValueError: no score in reward.py:44 fetch_score"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="there are no groups")
def test_of_a_group_the_first_one_is_told() -> None:
    def together() -> None:
        raise ExceptionGroup("two of two", [ExceptionGroup("inner", [raised_by("no")]), KeyError("b")])  # noqa: F821

    found = raised.read_exception(caught(together))
    assert found.message == "two of two (2 sub-exceptions)"
    assert re.fullmatch(r"KeyError: 'score' in test_raised.py:\d+ raised_by, and 1 more", found.cause)


def test_a_text_that_can_not_be_made_leaves_the_stack() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    try:
        raise Broken
    except Broken as error:
        told = raised.read_exception(error)
    assert (told.type, told.message) == ("Broken", "")
    assert told.frames[-1].function.endswith("leaves_the_stack")


def test_of_a_long_text_it_says_how_much_is_left_out() -> None:
    message = raised.read_exception(ValueError("word " * 1_000_000)).message
    found = re.search(r"\.\.\. \((\d+) more characters\)$", message)
    assert found is not None
    assert len(message) - len(found[0]) + int(found[1]) == 5_000_000
