#: set: AUTOPROF_RECIPES=held.toml
"""Functions in tables, registries and other names from before their hooks: identity, pickles, pools."""

import multiprocessing
import pickle

import held
from held import early, registry, rewards

HELD = {
    "module": rewards.length,
    "package": held.length,
    "circular import": early.length,
    "other name": rewards.size,
    "table": rewards.TABLE["length"],
    "list": rewards.LIST[0],
    "ordered": rewards.ORDERED["length"],
    "registry": registry.REWARDS.known["length"],
    "registry of a class": registry.Registry.everything["length"],
    "registry of a module": registry.BY_NAME["length"],
}
METHODS = {"table": rewards.TABLE["score"], "static": rewards.TABLE["still"], "later": rewards.TABLE["later"]}

if __name__ == "__main__":
    for name, function in HELD.items():
        print(name, function is rewards.length, function("abc"), function.__module__, function.__qualname__)
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            assert pickle.loads(pickle.dumps(function, protocol)) is function
    for name, function in METHODS.items():
        print(name, function.__qualname__, pickle.loads(pickle.dumps(function)) is function)
    print(METHODS["table"] is rewards.Scorer.score, METHODS["static"] is rewards.Scorer.still)
    print(list(rewards.TABLE), list(rewards.ORDERED), [each.__name__ for each in rewards.LIST], rewards.COUNTS)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(rewards.TABLE["length"], ["a", "bb"]), pool.map(rewards.length, ["a", "bb"]))
        print(pool.apply(rewards.TABLE["still"], ("abc",)))
