"""functools around hooked functions: wraps, partial, partialmethod, lru_cache, cached_property, singledispatch."""

import functools
import inspect

from tinyrl import Trainer, evaluate, score


@functools.wraps(score)
def mine(*args, **kwargs):
    return "mine", score(*args, **kwargs)


print(mine(["a"]), mine.__name__, inspect.signature(mine), inspect.unwrap(mine).__name__)
part = functools.partial(score, scale=3)
print(part(["ab"]), part.func is score, part.keywords, inspect.signature(part))
print(functools.partial(Trainer.update, Trainer())(lambda: 4))
cached = functools.lru_cache(maxsize=4)(Trainer.reward)
print(cached("abc"), cached("abc"), cached.cache_info(), cached.__wrapped__ is Trainer.reward)


class Mine(Trainer):
    fast = functools.partialmethod(Trainer.update, lambda: "fast")
    cached_update = functools.lru_cache(Trainer.update)

    @functools.cached_property
    def scores(self):
        return score(["x", "yy"])

    @functools.singledispatchmethod
    def reward(self, text):
        return Trainer.reward(str(text))

    @reward.register
    def _(self, text: int):
        return text


print(Mine().fast(), Mine().cached_update(), Mine().scores, Mine().reward(12), Mine().reward([1]))
dispatched = functools.singledispatch(evaluate)
dispatched.register(int, lambda number: number + 1)
print(dispatched(4), dispatched(lambda: 5), functools.reduce(lambda a, b: a + b, score(["a", "bb"])))
