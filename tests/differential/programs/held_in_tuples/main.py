#: set: AUTOPROF_RECIPES=held.toml
#: differs: what is not in a table, or not in one of the function's package, keeps the function without its hook
"""Functions that tuples, sets, keys, partials and closures hold before their hooks are applied."""

import pickle

import held

PLACES = {
    "tuple": held.TUPLE[0],
    "set": next(iter(held.SET)),
    "key": next(iter(held.KEYS)),
    "partial": held.PARTIAL,
    "closure": held.CLOSURE(),
    "default": held.default(),
}

for name, function in PLACES.items():
    try:
        pickle.dumps(function)
        said = "pickles"
    except pickle.PicklingError as error:
        said = str(error)
    print(name, function is held.length, function("abc"), said)
print(held.KEYS.get(held.length), held.length("abc"))
