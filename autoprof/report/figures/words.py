"""Words of a report: names of stages with their meanings, counts, lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from autoprof.config import kinds

# Part of a step that no timer and no stage covers.
OTHER = "other"
# Kind of spans in which autoprof starts or stops a profiler, or waits for a file.
PROFILING = "profiling"
# Name of that time among the stages of a step: the last row, outside of the 100 %.
OWN = "autoprof's own"
GENERATION, SCORING, TRAINING = "generation", "scoring", "training"
SYNC, VALIDATION, CHECKPOINT, REWARD = "weight sync", "validation", "checkpoint", "reward"

# Meanings that findings and colours distinguish, with their kinds of stages.
_MEANT = {
    GENERATION: "generate",
    SCORING: "log_prob ref_log_prob values",
    TRAINING: "update_actor update_critic optimizer",
    SYNC: "weight_sync",
    VALIDATION: "validate",
    CHECKPOINT: "checkpoint",
    REWARD: "reward",
}
_BY_KIND = {kind: meaning for meaning, meant in _MEANT.items() for kind in meant.split()}
_BY_NAME = {"mini_batch": TRAINING}
# Meanings of spans in samples and engines.
_KINDS = {"sample": GENERATION, "turn": GENERATION, "request": GENERATION, "window": GENERATION, "reward": REWARD}


def meaning(name: str, kind: str = "stage", stage_kind: str = "") -> str:
    """Return the meaning of a span: one of the words above, or `other`.

    Args:
        name: Its name.
        kind: The kind of the span.
        stage_kind: Its kind of stage. If empty, the kind is derived from the name, if that is well known.
    """
    return _KINDS.get(kind) or _BY_KIND.get(stage_kind or kinds.of(name)) or _BY_NAME.get(name, OTHER)


def seconds_of(stages: Mapping[str, float], wanted: str, known: Mapping[str, str] | None = None) -> float:
    """Sum the seconds of all stages with the meaning `wanted`. `known` has kinds that the names don't show, by name."""
    kind_of = known or {}
    return sum(seconds for name, seconds in stages.items() if meaning(name, stage_kind=kind_of.get(name, "")) == wanted)


def open_title(going_on: bool) -> str:
    """Return the title of the table of open spans."""
    return "Open now" if going_on else "Open at its end"


def several(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def listed(names: Iterable[str], most: int = 5) -> str:
    """Join names with commas. If there are many, list the first ones and the number of the others."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def name_ranks(numbers: Sequence[int], role: str) -> str:
    """Return the words for some ranks: `ranks 3, 5 of actor`."""
    of = f" of {role}" if role else ""
    return f"{plural(numbers, 'rank', 'ranks')} {listed(map(str, numbers), 8)}{of}"


def plural(things: Sequence[object], one: str, many: str) -> str:
    """Return `one` if there is one thing, else `many`."""
    return one if len(things) == 1 else many


# Sentence for a comparison without rows.
NOTHING_COMMON = "nothing to compare: neither side has steps that ended, or traces"
