"""The slowest ranks and replicas of late, for `AUTOPROF_RANKS=slowest:2`."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from statistics import mean, median

from autoprof.base.units import seconds
from autoprof.config.selection import Ranks
from autoprof.config.settings import Settings
from autoprof.windows.stats import RankStats, ReplicaStats, per_unit

# By the mean of so many steps.
KEPT = 5
_ROLLOUT = "rollout"


class Slowest:
    """The times of the last steps that were not captured."""

    def __init__(self) -> None:
        # By role and rank.
        self._ranks: dict[str, deque[Mapping[int, float]]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._replicas: deque[Mapping[int, float]] = deque(maxlen=KEPT)
        # Of what these are the times.
        self._unit = ""

    def note(self, ranks: Sequence[RankStats], replicas: Sequence[ReplicaStats]) -> None:
        """Note the statistics of a step."""
        times: dict[str, dict[int, float]] = defaultdict(dict)
        for each in ranks:
            for role, stages in each.stages.items():
                times[role][each.rank] = times[role].get(each.rank, 0.0) + sum(stages.values())
        for role, took in times.items():
            if len(took) > 1:
                self._ranks[role].append(took)
        if len(replicas) > 1:
            unit, took = per_unit(replicas)
            if unit != self._unit:
                self._replicas.clear()
            self._unit = unit
            self._replicas.append(took)

    def find(self, settings: Settings, first: Mapping[int, int]) -> dict[str, tuple[str, str]]:
        """Return the slowest ranks for a window, by role, in the grammar of `AUTOPROF_RANKS`, and why.

        Args:
            settings: Those of the window.
            first: The first global rank that each replica owns.
        """
        found = {}
        for role in {*self._ranks, _ROLLOUT}:
            count = Ranks.parse(settings.for_role(role).ranks).slowest
            if not count:
                continue
            if role == _ROLLOUT and self._replicas and first:
                chosen, why = _chosen("replica", self._unit, self._replicas, count)
                ranks = [first[replica] for replica in chosen if replica in first]
            elif role in self._ranks:
                ranks, why = _chosen("rank", "step", self._ranks[role], count)
            else:
                continue
            if ranks:
                found[role] = ",".join(map(str, sorted(ranks))), f"slowest:{count}: {why}"
        return found


def _chosen(what: str, unit: str, steps: Sequence[Mapping[int, float]], count: int) -> tuple[list[int], str]:
    """Return those that took longest on average, of all that the last of the steps had, and why."""
    times = {who: mean(step[who] for step in steps if who in step) for who in steps[-1]}
    chosen = sorted(times, key=lambda who: -times[who])[:count]
    took = ", ".join(f"{what} {who} {seconds(times[who])}" for who in chosen)
    compared = f"in the last {len(steps)} steps that were compared" if len(steps) > 1 else "in the last step compared"
    return chosen, f"{took} a {unit} {compared}; the median of {len(times)} is {seconds(median(times.values()))}"
