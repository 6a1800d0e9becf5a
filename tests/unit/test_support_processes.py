"""Tests of `tests.support.processes`."""

from __future__ import annotations

import pytest

from tests.support import processes


@pytest.mark.parametrize("session", [0, -1])
def test_end_all_refuses_a_session_that_no_command_has(session: int, monkeypatch: pytest.MonkeyPatch) -> None:
    signals: list[tuple[int, int]] = []
    monkeypatch.setattr(processes.os, "kill", lambda *arguments: signals.append(arguments))
    monkeypatch.setattr(processes, "_running", lambda tag, session: [1])
    with pytest.raises(ValueError, match=f"session {session} "):
        processes.end_all("tag", session, grace_s=0)
    assert signals == []
