#: needs: pytest
#: shell: $PYTHON -m pytest -q -p no:cacheprovider pytest_suite.py | sed 's/ in [0-9.]*s.*//'
"""Test suite of the user under pytest, with rewritten assertions, monkeypatch, and a failure."""

import pytest
from tinyrl import Trainer, score


@pytest.fixture
def trainer(monkeypatch):
    monkeypatch.setattr(Trainer, "reward", staticmethod(lambda text, scale=1: 7))
    return Trainer()


def test_good(trainer):
    assert score(["a"]) == [7]
    assert trainer.fit() == ["done", "done"]


def test_bad(trainer, capsys):
    print("captured")
    assert trainer.update(lambda: 1) == 2


def test_raises():
    with pytest.raises(ZeroDivisionError, match="division") as caught:
        Trainer().fit(inside=lambda: 1 / 0)
    assert caught.value.__context__ is None
    with pytest.warns(UserWarning):
        Trainer().update(__import__("warnings").warn, "warned")
