import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprof.config.selection import Ranks, Steps, parse_iterations


def matching(text: str, steps: range) -> list[int]:
    parsed = Steps.parse(text)
    return [step for place, step in enumerate(steps, 1) if parsed.matches(step, place)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2", [2]),
        ("2,5", [2, 5]),
        ("10:13", [10, 11, 12]),
        ("::50", [50]),
        ("5::20", [5, 25, 45]),
        ("58:", [58, 59]),
        (":3", [1, 2]),
        ("+2", [2]),
        ("+1,10:12,30", [1, 10, 11, 30]),
        (" 2 , 5 ", [2, 5]),
        ("0", []),
    ],
)
def test_steps_that_match_in_a_run_from_1_to_59(text: str, expected: list[int]) -> None:
    assert matching(text, range(1, 60)) == expected


def test_an_ordinal_counts_the_steps_of_this_run() -> None:
    assert matching("+2", range(4001, 4010)) == [4002]


@pytest.mark.parametrize(
    "text", [",", "2,,3", "x", "-1", "5:2", "3:3", "1:5:0", "+0", "+", "1.5", "+1:3", "2 3", "\u0662"]
)
def test_steps_that_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        Steps.parse(text)


@given(st.text(alphabet="0123456789:,+- x", max_size=20))
def test_any_text_is_parsed_or_refused_with_a_reason(text: str) -> None:
    for parse in (Steps.parse, Ranks.parse, parse_iterations):
        try:
            parse(text)
        except ValueError as error:
            assert str(error)


@given(
    st.lists(
        st.one_of(
            st.integers(0, 40).map(str),
            st.tuples(st.integers(0, 20), st.integers(21, 40)).map("{0[0]}:{0[1]}".format),
            st.tuples(st.integers(0, 20), st.integers(1, 9)).map("{0[0]}::{0[1]}".format),
            st.integers(1, 40).map("+{}".format),
        ),
        min_size=1,
        max_size=4,
    ).map(",".join),
    st.integers(0, 60),
    st.integers(1, 60),
)
def test_any_after_agrees_with_match(text: str, step: int, ordinal: int) -> None:
    steps = Steps.parse(text)
    later = any(steps.matches(step + more, ordinal + more) for more in range(1, 120))
    assert steps.any_after(step, ordinal) == later


def test_ranks() -> None:
    assert 0 in Ranks.parse("0,8")
    assert 7 not in Ranks.parse("0,8")
    assert Ranks.parse("0:4").any_in(range(3, 8))
    assert not Ranks.parse("0:4").any_in(range(4, 8))
    assert 12345 in Ranks.parse("all")
    with pytest.raises(ValueError, match="'x'"):
        Ranks.parse("x")


def test_iterations() -> None:
    assert parse_iterations("0:100") == (0, 100)
    assert parse_iterations(":5") == (0, 5)
    assert parse_iterations("all") == (0, None)
    for text in ("5:5", "7:2", "3", "2:", "a:b", "-1:3"):
        with pytest.raises(ValueError, match=r"\S"):
            parse_iterations(text)
