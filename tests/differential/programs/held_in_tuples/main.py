#: set: AUTOPROF_RECIPES=held.toml
#: differs: only tables in the function's own package get the hooked function; other references keep the original
"""Functions in tuples, sets, keys, partials and closures from before their hooks were applied."""

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
