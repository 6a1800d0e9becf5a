import functools


def length(text):
    return len(text)


def closure(function):
    return lambda: function


def default(function=length):
    return function


TUPLE = (length,)
SET = {length}
KEYS = {length: "a key"}
PARTIAL = functools.partial(length)
CLOSURE = closure(length)
