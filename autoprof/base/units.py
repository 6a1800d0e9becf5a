"""Texts for users: figures with units and few digits, short names, and suggestions for misspelt names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autoprof.base.originals import time


def seconds(value: float | None) -> str:
    """Return a duration in s as text: `11.2 s`, `340 ms`, `3 min 20 s`, `2 h 5 min`; `-` if it is unknown."""
    if value is None:
        return "-"
    if value < 0:
        return f"-{seconds(-value)}"
    if value == 0:
        return "0 s"
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if value * factor < 999.5:
            return f"{_digits(value * factor)} {unit}"
    if value < 119.5:
        return f"{_digits(value)} s"
    amount = round(value)
    if amount < 7200:
        return f"{amount // 60} min {amount % 60} s"
    amount = round(value / 60)
    return f"{amount // 60} h {amount % 60} min"


def change(value: float) -> str:
    """Return a difference of durations in s as text, with its sign."""
    return f"+{seconds(value)}" if value > 0 else seconds(value)


def rate(value: float | None) -> str:
    """Return a rate per second as text: `12,300 /s`; `-` if it is unknown."""
    return "-" if value is None else f"{number(value)} /s"


def number(value: float | None) -> str:
    """Return a number as text, with three significant digits, or all digits of a whole number; `-` if it is unknown."""
    if value is None:
        return "-"
    if value < 0:
        return f"-{number(-value)}"
    return f"{round(value):,}" if float(value).is_integer() or abs(value) >= 100 else _digits(value)


def share(value: float | None) -> str:
    """Return a share from 0 to 1 as text in percent: `< 0.1 %`, `2.5 %`, `40 %`; `-` if it is unknown."""
    if value is None:
        return "-"
    if value < 0:
        return f"-{share(-value)}"
    percent = value * 100
    if 0 < percent < 0.05:
        return "< 0.1 %"
    return f"{percent:.1f} %" if 0 < percent < 9.95 else f"{percent:.0f} %"


def size(value: int | None) -> str:
    """Return a number of bytes as text: `12 B`, `1.2 kB`, `3.40 GB`; `-` if it is unknown."""
    if value is None:
        return "-"
    amount = float(value)
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.2f} GB"


def count(value: int, thing: str, things: str = "") -> str:
    """Return a number of things as text: `1 capture`, `2 captures`. `things` is an irregular plural."""
    return f"{number(value)} {thing if value == 1 else things or f'{thing}s'}"


def ranges(numbers: Sequence[int]) -> str:
    """Return sorted whole numbers as text, with consecutive ones as a range: `2,4-7`; `-` for an empty list."""
    parts: list[list[int]] = []
    for value in numbers:
        if parts and value == parts[-1][-1] + 1:
            parts[-1].append(value)
        else:
            parts.append([value])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 2 else ",".join(map(str, part)) for part in parts) or "-"


def moment(unix_ns: int | None) -> str:
    """Return a time as text in UTC, so that a page shows the same text in every time zone; `-` if it is unknown."""
    if unix_ns is None:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix_ns / 1e9))


def short(name: str, max_chars: int = 60) -> str:
    """Return a name of at most `max_chars` characters. A longer name loses its middle."""
    if len(name) <= max_chars:
        return name
    end = max_chars // 3
    return f"{name[: max_chars - end - 1]}…{name[-end:]}"


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return `; did you mean X?` if a correct name X is similar to `name` or contains `name`, else an empty text.

    Args:
        name: The wrong name.
        known: The correct names.
        prefix: Text to put before X. The prefix is not compared with `name`.
    """
    # Only needed for errors.
    from difflib import get_close_matches

    names = list(known)
    longer_names = [candidate for candidate in names if len(name) > 2 and name in candidate]
    similar_names = longer_names if len(longer_names) == 1 else get_close_matches(name, names, 1, 0.6)
    return f"; did you mean {prefix + similar_names[0]!r}?" if similar_names else ""


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.5 else f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"
