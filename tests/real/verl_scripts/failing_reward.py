"""A reward that cannot be had: the service that knows it answers nothing from some score on."""

FAILS_AT = 12
scored = []


def fetch_score(solution_str):
    """The share of digits in the answer."""
    scored.append(None)
    if len(scored) == FAILS_AT:
        raise ValueError("no score for api_key=sk-abcdefghijklmnop1234")
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))


async def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return fetch_score(solution_str)
