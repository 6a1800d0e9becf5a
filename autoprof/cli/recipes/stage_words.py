"""Kinds of stages by the words in the names of functions."""

from __future__ import annotations

import re

# What a name that begins so does beside the work that the rest of it names.
_ASIDE = re.compile(
    "log|dump|write|print|init|create|set|is|has|build|setup|shutdown|register|add|remove|make|parse|count|num|check|"
    "resolve|assert|load|on|should|maybe|prepare|wait|default|reissue|submit|fetch|merge|start|stop"
)
_CRITIC = {"critic", "value"}
# Who does the work of a kind.
ROLES = {
    "generate": "rollout",
    "reward": "reward",
    "log_prob": "actor",
    "ref_log_prob": "ref",
    "values": "critic",
    "update_actor": "actor",
    "update_critic": "critic",
    "optimizer": "actor",
    "weight_sync": "actor",
}


def tokens(name: str) -> list[str]:
    """Return the words of a name in small letters."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+", name)]


def kind_of(name: str) -> str:
    """Return the kind of stage that a function of this name is, or an empty text."""
    words = tokens(name)
    if not words or _ASIDE.fullmatch(words[0]):
        return ""
    joined, there = "_".join(words), set(words)
    if re.search(r"log_?probs?|logps?|log_likelihood", joined):
        return "ref_log_prob" if there & {"ref", "reference"} else "log_prob"
    if words[0] in ("validate", "evaluate", "evaluation", "eval", "validation", "test") and (
        len(words) == 1 or words[1] in ("epoch", "step", "model", "policy")
    ):
        return "validate"
    if words[0] in ("save", "checkpoint") and (len(words) == 1 or there & {"checkpoint", "ckpt", "checkpoints"}):
        return "checkpoint"
    if there & {"sync", "update", "push", "broadcast", "transfer", "refit"} and there & {
        "weight",
        "weights",
        "params",
        "parameters",
    }:
        return "weight_sync"
    if (words[0] in ("optimizer", "optim") and "step" in there) or joined in ("optimize", "step_optimizer"):
        return "optimizer"
    if words[0] in ("update", "train", "training", "learn", "optimize", "ppo", "fit", "policy"):
        return _update(words)
    if there & {"advantage", "advantages", "adv", "gae", "returns"}:
        return "advantage"
    if words[0] in ("generate", "sample", "gen", "generation") or joined.endswith("_rollout"):
        return "generate"
    if words[0] == "rollout" and (len(words) == 1 or words[1] in ("step", "batch", "phase", "once", "samples")):
        return "generate"
    if there & {"generate", "rollouts", "rollout"} and words[0] in ("do", "run", "collect", "async"):
        return "generate"
    if there & {"reward", "rewards", "score", "scores"} and not there & {"metrics", "extra", "fn", "func", "handles"}:
        return "reward" if words[0] not in ("get", "val") or words[1:] in (["reward"], ["rewards"]) else ""
    if words[-1] == "values" and words[0] in ("compute", "get", "calculate", "values"):
        return "values"
    return "data" if re.fullmatch(r"(get|next|load|read|sample)_(next_)?batch(es)?(_samples)?", joined) else ""


def _update(words: list[str]) -> str:
    rest = set(words[1:])
    if rest & _CRITIC and not rest & {"target"}:
        return "update_critic"
    known = {"actor", "policy", "model", "step", "batch", "minibatch", "mini", "grpo", "ppo", "on", "update", "train"}
    if words[0] in ("train", "fit", "ppo") and not rest:
        return ""
    return "update_actor" if rest <= known | {"one", "training"} else ""
