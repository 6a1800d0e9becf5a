"""Texts of a report: names and meanings of stages, numbers with a noun, lists of names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from autoprof.config import kinds

# Name of the part of a step that no timer and no stage covers.
OTHER = "other"
# Kind of the spans in which autoprof starts or stops a profiler, or waits for a file.
PROFILING = "profiling"
# Name under which the time of these spans is listed among the stages of a step. It is the last row, and the time is not
# part of the 100 %.
OWN = "autoprof's own"
GENERATION, SCORING, TRAINING = "generation", "scoring", "training"
SYNC, VALIDATION, CHECKPOINT, REWARD = "weight sync", "validation", "checkpoint", "reward"

# Meanings of stages that findings and colours distinguish, and the kinds of stages that have each meaning.
_KINDS_OF_MEANINGS = {
    GENERATION: "generate",
    SCORING: "log_prob ref_log_prob values",
    TRAINING: "update_actor update_critic optimizer",
    SYNC: "weight_sync",
    VALIDATION: "validate",
    CHECKPOINT: "checkpoint",
    REWARD: "reward",
}
_BY_KIND = {kind: meaning for meaning, meant in _KINDS_OF_MEANINGS.items() for kind in meant.split()}
_BY_NAME = {"mini_batch": TRAINING}
# Meanings of spans that belong to samples and engines, by the kind of the span.
_MEANINGS_OF_SPANS = {
    "sample": GENERATION,
    "turn": GENERATION,
    "request": GENERATION,
    "window": GENERATION,
    "reward": REWARD,
}


def meaning(name: str, kind: str = "stage", stage_kind: str = "") -> str:
    """Return the meaning of a span: a constant of this module, such as `TRAINING`, or `OTHER`.

    Args:
        name: The name of the span.
        kind: The kind of the span.
        stage_kind: The kind of the stage. If empty, it is derived from the name. This works for well-known names only.
    """
    return _MEANINGS_OF_SPANS.get(kind) or _BY_KIND.get(stage_kind or kinds.of(name)) or _BY_NAME.get(name, OTHER)


def seconds_of(stages: Mapping[str, float], wanted: str, known: Mapping[str, str] | None = None) -> float:
    """Return the sum of the seconds of all stages with the meaning `wanted`.

    Args:
        stages: Dict from the name of each stage to its seconds.
        wanted: The meaning.
        known: Dict from the names of stages to their kinds, if the names don't show the kinds.
    """
    kind_of = known or {}
    return sum(seconds for name, seconds in stages.items() if meaning(name, stage_kind=kind_of.get(name, "")) == wanted)


def open_title(going_on: bool) -> str:
    """Return the title of the table of open spans. `going_on` is True for a run that is running."""
    return "Open now" if going_on else "Open at its end"


def several(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def listed(names: Iterable[str], most: int = 5) -> str:
    """Join names with commas. If there are more than `most` names, list the first `most` and count the others."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def name_ranks(numbers: Sequence[int], role: str) -> str:
    """Return a text that names some ranks, such as `ranks 3, 5 of actor`."""
    of = f" of {role}" if role else ""
    return f"{plural(numbers, 'rank', 'ranks')} {listed(map(str, numbers), 8)}{of}"


def plural(things: Sequence[object], one: str, many: str) -> str:
    """Return `one` if there is one thing, else `many`."""
    return one if len(things) == 1 else many


# Text that is shown for a comparison without rows.
NOTHING_COMMON = "nothing to compare: neither side has steps that ended, or traces"
