"""Words of a report: names of stages with their meanings, counts, lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autoprof.config import kinds

# The part of a step that no timer and no stage covers.
OTHER = "other"
# The kind of a span in which autoprof starts or stops a profiler, or waits for a file.
PROFILING = "profiling"
# The row of that time among the stages of a step: the last one, outside of the 100 %.
OWN = "autoprof's own"
GENERATION, SCORING, TRAINING = "generation", "scoring", "training"
SYNC, VALIDATION, CHECKPOINT, REWARD = "weight sync", "validation", "checkpoint", "reward"

# What findings and colours tell apart, by the kinds of stages.
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
# What goes on in samples and in engines.
_KINDS = {"sample": GENERATION, "turn": GENERATION, "request": GENERATION, "window": GENERATION, "reward": REWARD}


def meaning(name: str, kind: str = "stage", stage_kind: str = "") -> str:
    """Return the meaning of a span: one of the words above, or `other`.

    Args:
        name: Its name.
        kind: The kind of the span.
        stage_kind: Its kind of stage, where that is known; else a well-known name tells.
    """
    return _KINDS.get(kind) or _BY_KIND.get(stage_kind or kinds.of(name)) or _BY_NAME.get(name, OTHER)


def seconds_of(stages: Mapping[str, float], wanted: str, known: Mapping[str, str] | None = None) -> float:
    """Sum the seconds of all stages of one meaning. `known` are kinds that the names do not tell."""
    of = known or {}
    return sum(seconds for name, seconds in stages.items() if meaning(name, stage_kind=of.get(name, "")) == wanted)


def open_title(going_on: bool) -> str:
    """Return the title of what has begun and not ended."""
    return "Open now" if going_on else "Open at its end"


def several(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def listed(names: Iterable[str], most: int = 5) -> str:
    """List names one after the other; of many the first few and how many more."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
