"""Lines of autoprof's log."""

from __future__ import annotations

import logging
from unittest import mock

import pytest

from autoprof.base import log

LOGGER = logging.getLogger("autoprof")


def test_levels_below_that_of_the_log_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info")
    log.debug("detail")
    log.info("two\nlines")
    log.warning("wrong")
    assert capsys.readouterr().err == "autoprof: two lines\nautoprof: wrong\n"


def test_a_mocked_clock_receives_no_call_for_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info")
    with mock.patch("time.time", side_effect=StopIteration) as clock, mock.patch("os.getpid") as getpid:
        log.warning("wrong")
    assert (clock.called, getpid.called) == (False, False)
    assert capsys.readouterr().err == "autoprof: wrong\n"


def test_a_handler_that_the_program_adds_receives_records(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info")
    handler = mock.Mock(level=logging.INFO)
    LOGGER.addHandler(handler)
    try:
        log.warning("wrong")
    finally:
        LOGGER.removeHandler(handler)
    assert handler.handle.call_args.args[0].getMessage() == "wrong"
    assert capsys.readouterr().err == "autoprof: wrong\n"


def test_logging_that_the_program_disables_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info")
    logging.disable(logging.WARNING)
    try:
        log.warning("wrong")
    finally:
        logging.disable(logging.NOTSET)
    assert capsys.readouterr().err == ""


def test_a_filter_that_the_program_adds_drops_lines(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info")
    LOGGER.addFilter(is_harmless := lambda record: record.getMessage() != "wrong")
    try:
        log.warning("wrong")
        log.warning("right")
    finally:
        LOGGER.removeFilter(is_harmless)
    assert capsys.readouterr().err == "autoprof: right\n"


def test_a_filter_by_the_name_of_the_log_keeps_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info")
    LOGGER.addFilter(own_lines := logging.Filter("autoprof"))
    try:
        log.warning("right")
    finally:
        LOGGER.removeFilter(own_lines)
    assert capsys.readouterr().err == "autoprof: right\n"
