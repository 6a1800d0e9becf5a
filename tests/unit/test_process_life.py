"""Children of a run's process: forked, spawned, or from a fork server, during a window and outside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autoprof.rundir import runs
from tests.support.helpers import Python, processes_of
from tests.support.small_trainer import metas


def processes(folder: Path) -> list[dict[str, Any]]:
    """Return the processes of the newest run; the process that began the run comes first."""
    return processes_of(Path(runs.find(folder / "autoprof_runs", "latest").path))


# Code of a child and its exit status. Without autoprof, torch lets children that exit normally hang or abort (2.13).
CHILDREN = {
    "computes and leaves at once": ("torch.ones(9, 9) @ torch.ones(9, 9); os._exit(4)", 4),
    "leaves by sys.exit": ("sys.exit(3)", 3),
    "raises": ("raise ValueError", 1),
    "is a trainer itself": ("Trainer().fit(inside); sys.exit(5)", 5),
}


@pytest.mark.fault("os.fork in a window", "parent and child continue", "nothing")
def test_children_forked_in_a_window_do_not_change_their_parents_capture(go: Python, tmp_path: Path) -> None:
    code = f"""
me = os.getpid()
def inside():
    if os.getpid() != me:
        return
    for does in {[does for does, _ in CHILDREN.values()]}:
        child = os.fork()
        if not child:
            exec(does)
        deadline = time.monotonic() + 40
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            assert time.monotonic() < deadline, f"the child hangs: {{does}}"
            time.sleep(0.02)
        print(os.waitstatus_to_exitcode(ended[1]))
Trainer().fit(inside)
"""
    done = go(code)
    assert done.stdout.split() == [str(status) for _, status in CHILDREN.values()]
    (run,) = runs.runs(tmp_path / "autoprof_runs")
    assert run.state == "ended"
    assert not list(Path(run.path).rglob("*.part"))
    mine = [meta for meta in metas(tmp_path) if meta["pid"] == run.info.pid]
    assert [(meta["state"], meta["reason"]) for meta in mine] == [("complete", "")]
    # The child that trains has its own file with its own calls.
    parent, own = processes(tmp_path)
    assert own["parent"] == parent["pid"]
    assert all(hook["called"] for hook in own["hooks"].values())
    assert len(list(Path(run.path, "journal").glob("*.jsonl"))) == 2


@pytest.mark.fault("fork, spawn and forkserver children", "continue", "nothing")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_multiprocessing_have_their_own_files(go: Python, tmp_path: Path, method: str) -> None:
    code = f"""
import multiprocessing
child = multiprocessing.get_context("{method}").Process(target=Trainer().fit, kwargs={{"steps": 2}})
child.start()
Trainer().fit(steps=2)
child.join(60)
print(child.exitcode)
"""
    assert go(code).stdout == "0\n"
    (run,) = runs.runs(tmp_path / "autoprof_runs")
    assert run.state == "ended"
    found = processes(tmp_path)
    assert len({process["pid"] for process in found}) == len(found)
    captured = {meta["pid"]: meta["state"] for meta in metas(tmp_path)}
    assert len(captured) == 2
    assert set(captured.values()) == {"complete"}
    assert set(captured) <= {process["pid"] for process in found}


@pytest.mark.fault("os.fork while a thread first calls a hook", "continues", "nothing")
@pytest.mark.parametrize("when", ["", "step>2x"])
def test_the_first_call_of_a_hook_imports_nothing(go: Python, when: str) -> None:
    # A child forked while another thread imports a module would wait for that import forever.
    code = """
trainer = Trainer()
before = set(sys.modules)
trainer.fit(steps=1)
print(sorted(set(sys.modules) - before))
"""
    assert go(code, AUTOPROF_STEPS="", AUTOPROF_WHEN=when).stdout == "[]\n"
