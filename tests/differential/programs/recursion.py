"""Recursion through stages, and endless recursion in a stage."""

from tinyrl import Trainer, evaluate


def down(depth):
    return evaluate(down, depth - 1) if depth else "bottom"


print(down(50))


def endless():
    return endless()


for call in (Trainer().update, evaluate, Trainer().fit):
    try:
        call(inside=endless)
    except RecursionError as error:
        print(error, error.__context__, error.__cause__)
print(down(5), Trainer().fit())


def endless_through():
    return evaluate(endless_through)


try:
    endless_through()
except RecursionError:
    print("caught")
print(Trainer().fit())
