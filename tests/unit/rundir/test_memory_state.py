"""Memory of control groups of both versions, from folders that imitate the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoprof.rundir import memory_state

GB = 1 << 30
NO_LIMIT = 0x7FFFFFFFFFFFF000


def kernel(folder: Path, group: str, files: dict[str, str]) -> tuple[Path, Path]:
    """Make `/proc` and `/sys/fs/cgroup` with these files; return both."""
    proc, cgroups = folder / "proc", folder / "cgroup"
    written = {
        proc / "self" / "status": "Name:\tx\nVmHWM:\t  3072 kB\nVmRSS:\t  2048 kB\n",
        proc / "self" / "cgroup": group,
        proc / "meminfo": f"MemTotal: {64 << 20} kB\nMemAvailable: {60 << 20} kB\n",
        proc / "vmstat": "nr_free_pages 5\noom_kill 7\n",
    } | {cgroups / name: text for name, text in files.items()}
    for path, text in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return proc, cgroups


@pytest.mark.parametrize(
    ("group", "sizes", "used_and_limit"),
    [
        ("0::/", {"": (5, 8, 0)}, (5, 8)),
        ("0::/a/b", {"a": (5, 8, 1), "a/b": (3, 0, 1)}, (4, 8)),
        ("0::/a/b", {"": (61, 62, 0), "a": (47, 60, 0), "a/b": (48, 50, 0)}, (61, 62)),
        ("0::/a/b", {"": (60, 63, 0), "a": (47, 60, 0), "a/b": (48, 50, 0)}, (48, 50)),
        ("0::/a/b", {"a": (50, 50, 20), "a/b": (33, 40, 0)}, (33, 40)),
        ("0::/a", {"a": (50, 61, 0)}, (54, 64)),
        ("0::/a", {"a": (50, 99, 0)}, (54, 64)),
        ("0::/elsewhere", {"": (5, 8, 9)}, (0, 8)),
        ("4:memory:/a", {"memory": (60, 0, 0), "memory/a": (30, 32, 1)}, (29, 32)),
        ("4:memory:/a", {"memory": (60, 0, 0), "memory/a": (30, 0, 0)}, (54, 64)),
    ],
)
def test_the_limit_with_the_least_free_memory_counts(
    tmp_path: Path, group: str, sizes: dict[str, tuple[int, int, int]], used_and_limit: tuple[int, int]
) -> None:
    """The sizes of each group are: used, limit (0 for none), inactive file pages. The machine has used 54 of 64."""
    contents = {}
    for folder, (used, limit, inactive) in sizes.items():
        names = ("memory.max", "memory.current", "memory.events", "inactive_file")
        no_limit = "max"
        if folder.startswith("memory"):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", "total_inactive_file")
            no_limit = str(NO_LIMIT)
        contents |= {
            f"{folder}/{names[0]}": str(limit * GB) if limit else no_limit,
            f"{folder}/{names[1]}": str(used * GB),
            f"{folder}/{names[2]}": "oom_kill 0",
            f"{folder}/memory.stat": f"anon 1\n{names[3]} {inactive * GB}\n",
        }
    proc, cgroups = kernel(tmp_path, group, {path.lstrip("/"): text for path, text in contents.items()})
    (proc / "meminfo").write_text(f"MemTotal: {64 << 20} kB\nMemFree: 5 kB\nMemAvailable: {10 << 20} kB\n")
    state = memory_state.state(proc, cgroups)
    assert (state.used_bytes / GB, state.limit_bytes / GB) == used_and_limit


def test_version_2_with_a_limit_above_the_own_group(tmp_path: Path) -> None:
    proc, cgroups = kernel(
        tmp_path,
        "0::/pod/train\n",
        {
            "pod/memory.max": f"{62 * GB}\n",
            "pod/memory.current": f"{61 * GB}\n",
            "pod/memory.stat": f"anon {60 * GB}\ninactive_file {GB}\n",
            "pod/memory.peak": f"{61 * GB}\n",
            "pod/train/memory.max": "max\n",
            "pod/train/memory.events": "low 0\noom 3\noom_kill 2\noom_group_kill 0\n",
        },
    )
    found = memory_state.state(proc, cgroups)
    assert (found.resident_bytes, found.peak_bytes) == (2 << 20, 3 << 20)
    assert (found.used_bytes, found.used_peak_bytes, found.limit_bytes) == (60 * GB, 61 * GB, 62 * GB)
    assert (found.kills, found.machine_kills, found.cgroup) == (2, 7, str(cgroups / "pod" / "train"))
    assert memory_state.kills(found.cgroup) == 2


def test_version_1(tmp_path: Path) -> None:
    proc, cgroups = kernel(
        tmp_path,
        "5:cpu:/x\n4:memory:/job\n0::/\n",
        {
            "memory/job/memory.limit_in_bytes": f"{8 * GB}\n",
            "memory/job/memory.usage_in_bytes": f"{8 * GB}\n",
            "memory/job/memory.stat": f"inactive_file 7\ntotal_inactive_file {GB}\n",
            "memory/job/memory.max_usage_in_bytes": f"{8 * GB}\n",
            "memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
        },
    )
    found = memory_state.state(proc, cgroups)
    assert (found.used_bytes, found.used_peak_bytes, found.limit_bytes, found.kills) == (7 * GB, 8 * GB, 8 * GB, 1)


def test_in_a_container_that_sees_its_group_as_the_root(tmp_path: Path) -> None:
    proc, cgroups = kernel(
        tmp_path,
        "0::/../../docker/abc\n",
        {"memory.max": f"{2 * GB}\n", "memory.current": f"{GB}\n", "memory.events": "oom_kill 4\n"},
    )
    found = memory_state.state(proc, cgroups)
    assert (found.used_bytes, found.limit_bytes, found.kills) == (GB, 2 * GB, 4)


def test_without_a_limit_the_machines_memory_counts(tmp_path: Path) -> None:
    proc, cgroups = kernel(
        tmp_path,
        "4:memory:/\n",
        {"memory/memory.limit_in_bytes": f"{NO_LIMIT}\n", "memory/memory.oom_control": "oom_kill 1\n"},
    )
    found = memory_state.state(proc, cgroups)
    assert (found.used_bytes, found.limit_bytes, found.kills) == (4 * GB, 64 * GB, 1)
    nothing = memory_state.state(tmp_path / "no", tmp_path / "no")
    assert (nothing.resident_bytes, nothing.limit_bytes, nothing.kills) == (0, 0, 0)


def test_a_line_follows_when_somebody_was_killed(tmp_path: Path, monkeypatch) -> None:
    proc, cgroups = kernel(tmp_path, "0::/job\n", {"job/memory.max": f"{GB}\n", "job/memory.events": "oom_kill 0\n"})
    state = memory_state.state
    monkeypatch.setattr(memory_state, "state", lambda: state(proc, cgroups))
    watch = memory_state.MemoryWatch()
    watch.recent()
    assert watch.look() is None
    assert watch.look(even_if_same=True) is not None
    (cgroups / "job" / "memory.events").write_text("oom_kill 1\n")
    line = watch.look()
    assert line is not None
    assert line.memory.kills == 1
    assert watch.look() is None
    (proc / "self" / "status").write_text("VmRSS: 200000 kB\n")
    assert watch.look() is not None
