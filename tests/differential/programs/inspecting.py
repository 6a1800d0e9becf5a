"""Results of inspect for functions, methods and classes."""

import inspect

import tinyrl.trainer
from tinyrl import Trainer, evaluate, score

for function in (score, evaluate, Trainer.update, Trainer.build, Trainer.reward, Trainer.agenerate, Trainer().update):
    print(inspect.signature(function), inspect.getdoc(function))
    print(inspect.isfunction(function), inspect.ismethod(function), inspect.isroutine(function))
    print(inspect.iscoroutinefunction(function), inspect.isgeneratorfunction(function))
    print(inspect.getsource(function).splitlines()[0], inspect.getsourcelines(function)[1])
print(inspect.getsource(Trainer) in inspect.getsource(tinyrl.trainer))
print([name for name, _ in inspect.getmembers(Trainer, inspect.isfunction)])
print([name for name, _ in inspect.getmembers(Trainer(), inspect.ismethod)])
print([name for name, _ in inspect.getmembers(tinyrl.trainer, inspect.isfunction)])
print([(each.name, each.kind, each.defining_class.__name__) for each in inspect.classify_class_attrs(Trainer)][-12:])
print(type(inspect.getattr_static(Trainer, "build")), type(inspect.getattr_static(Trainer(), "reward")))
print(Trainer().update(inside=lambda: 3))
