"""Rule-based reward for the toy sums: cheap, deterministic, and different from sample to sample."""

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **kwargs: Any
) -> float:
    """Return one point for the right sum, plus the share of digits in the answer.

    An untrained model never gets the point. The second term is what makes the answers of a group
    differ, without which GRPO's advantages would all be zero.
    """
    digits = sum(character.isdigit() for character in solution_str)
    return float(ground_truth in solution_str) + digits / max(1, len(solution_str))
