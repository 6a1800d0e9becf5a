"""Reward that hangs at the first score of one step, and is in a deadlock of two locks at the first of another."""

import threading
import time

from standing import FOLDER, LOCKS, REWARD, first, must_wait, wait

_scores, _cache = threading.Lock(), threading.Lock()
_both = threading.Barrier(2)


def fetch_score():
    """Wait, as for a server that does not answer."""
    while must_wait(REWARD):
        time.sleep(0.2)


def update_cache():
    with _cache:
        _both.wait()
        with _scores:
            pass


def score_and_cache():
    with _scores:
        _both.wait()
        with _cache:
            pass


def _let_go():
    """Release a lock that another thread holds, so that the run can end."""
    wait(LOCKS)
    _scores.release()


def _tried(work):
    try:
        work()
    except RuntimeError:  # _let_go has released the lock
        pass


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """Return the share of digits in the answer."""
    if first(REWARD):
        fetch_score()
    if first(LOCKS):
        threading.Thread(target=_let_go, daemon=True).start()
        threading.Thread(target=_tried, args=[update_cache], name="cache", daemon=True).start()
        _tried(score_and_cache)
        time.sleep(0.1)
        (FOLDER / "unlocked").touch()
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))
