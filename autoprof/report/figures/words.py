"""Words of a report: names of stages with their meanings, counts, lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# The part of a step that no timer and no stage covers.
OTHER = "other"
# What autoprof itself took of a captured step: to start the profiler, to stop it, to wait for what is written.
PROFILING = "profiling"
GENERATION, SCORING, TRAINING = "generation", "scoring", "training"
SYNC, VALIDATION, CHECKPOINT, REWARD = "weight sync", "validation", "checkpoint", "reward"

# Timers are verl's (marked_timer, 0.5 to 0.9.1), stages those of the recipes.
_MEANT = {
    GENERATION: "gen gen_max rollout generate generate_sequences generate_async wait_for_enough_samples generation",
    SCORING: "old_log_prob ref values compute_log_prob compute_ref_log_prob compute_values",
    TRAINING: "update_actor update_critic train_batch training_step optimizer_step mini_batch",
    SYNC: "update_weights sync_rollout_weights sync_weights switch_to_rollout switch_to_trainer reshard",
    VALIDATION: "testing validate evaluate",
    CHECKPOINT: "save_checkpoint",
    REWARD: "reward compute_reward compute_rm_score compute_score compute_score_batch",
}
_BY_NAME = {name: meaning for meaning, names in _MEANT.items() for name in names.split()}
# What goes on in samples and in engines.
_KINDS = {"sample": GENERATION, "turn": GENERATION, "request": GENERATION, "window": GENERATION, "reward": REWARD}


def meaning(name: str, kind: str = "stage") -> str:
    """Return the meaning of a span: one of the words above, or `other`."""
    return _KINDS.get(kind) or _BY_NAME.get(name, OTHER)


def seconds_of(stages: Mapping[str, float], wanted: str) -> float:
    """Sum the seconds of all stages of one meaning."""
    return sum(seconds for name, seconds in stages.items() if meaning(name) == wanted)


def several(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def listed(names: Iterable[str], most: int = 5) -> str:
    """List names one after the other; of many the first few and how many more."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
