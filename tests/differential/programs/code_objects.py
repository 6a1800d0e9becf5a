#: differs: a wrapper is a separate function with other __code__, __defaults__ and __globals__
"""Code that reads a function's code object, as older libraries do for the names of parameters."""

from tinyrl import Trainer, score

print(score.__code__.co_name, score.__code__.co_varnames[: score.__code__.co_argcount], score.__defaults__)
print(score.__kwdefaults__, score.__globals__["__name__"])
print(Trainer.update.__code__.co_varnames[0], Trainer.update.__code__.co_firstlineno)
print(score(["a"]))
