from collections import OrderedDict, defaultdict

from held.registry import BY_NAME, REWARDS


@REWARDS.register
def length(text):
    return len(text)


class Scorer:
    def score(self, text):
        return len(text)

    @staticmethod
    def still(text):
        return len(text)

    async def later(self, text):
        return len(text)


BY_NAME["length"] = size = length
TABLE = {"length": length, "score": Scorer.score, "still": Scorer.still, "later": Scorer.later}
LIST = [length, len]
ORDERED = OrderedDict(first=len, length=length, last=len)
COUNTS = defaultdict(int, a=1)

import held.early  # noqa: E402, F401
