"""Kinds of stages: one vocabulary for the stages of all trainers, in addition to each trainer's own names."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias, get_args

Kind: TypeAlias = Literal[
    "generate",
    "reward",
    "log_prob",
    "ref_log_prob",
    "values",
    "advantage",
    "update_actor",
    "update_critic",
    "optimizer",
    "weight_sync",
    "checkpoint",
    "validate",
    "data",
]
KINDS: tuple[str, ...] = get_args(Kind)
GENERATE: Kind = "generate"
# Names of stages and timers for each kind. The timers are timers of verl (marked_timer, 0.5 to 0.9.1).
_NAMES: dict[Kind, str] = {
    "generate": "gen gen_max rollout generation generate_sequences generate_async generate_samples "
    "wait_for_enough_samples",
    "reward": "compute_reward compute_rewards compute_rm_score compute_score compute_score_batch",
    "log_prob": "old_log_prob compute_log_prob compute_log_probs compute_logp logprobs",
    "ref_log_prob": "ref ref_logprobs compute_ref_log_prob compute_ref_log_probs",
    "values": "compute_values",
    "advantage": "adv advantages compute_advantage compute_advantages",
    "update_actor": "update_policy train_actor policy_training train_batch training_step train_step",
    "update_critic": "train_critic critic_training",
    "optimizer": "optimizer_step",
    "weight_sync": "update_weights sync_weights sync_rollout_weights switch_to_rollout switch_to_trainer reshard",
    "checkpoint": "save_checkpoint save",
    "validate": "testing validation evaluate evaluation eval",
    "data": "get_batch load_data data_loading",
}
_BY_NAME: dict[str, Kind] = {name: kind for kind, names in _NAMES.items() for name in (kind, *names.split())}


def of(name: str) -> str:
    """Return the kind of a stage with this name, or an empty text if the name is unknown."""
    return _BY_NAME.get(name, "")


def chosen(kind: Kind | Mapping[str, Kind], name: str) -> str:
    """Return the kind of a stage according to its hook.

    If the hook has no kind for the stage, return the kind according to the stage's name, or an empty text if the name
    is unknown.

    Args:
        kind: The option `kind` of the hook: one kind, or a dict from patterns for stage names to kinds. The first
            pattern that matches decides.
        name: The stage's name.
    """
    if isinstance(kind, str):
        return kind
    return next((match for pattern, match in kind.items() if fnmatchcase(name, pattern)), _BY_NAME.get(name, ""))
