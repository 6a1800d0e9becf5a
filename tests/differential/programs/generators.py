"""Generators that call stages, that run in stages, and that are closed early."""

from tinyrl import Trainer, evaluate

trainer = Trainer()


def batches(count):
    try:
        for number in range(count):
            got = yield trainer.update(lambda number=number: number)
            if got:
                print("got", got)
    except GeneratorExit:
        print("closed")
        raise
    finally:
        print("ends", trainer.update(lambda: "last"))
    return "returned"


print(list(batches(3)))
generator = batches(9)
print(next(generator), generator.send("sent"), trainer.update(lambda: next(generator)))
generator.close()
generator = batches(2)
next(generator)
try:
    generator.throw(KeyError("thrown"))
except KeyError as error:
    print(repr(error))
made = evaluate(lambda: (each for each in range(3)))
print(type(made).__name__, list(made))


def delegates():
    print((yield from batches(1)))


print(list(delegates()))
try:
    evaluate(next, iter([]))
except StopIteration as error:
    print("stop", error.args)


def uses():
    yield evaluate(next, iter([]))


try:
    list(uses())
except RuntimeError as error:
    print(error, repr(error.__cause__))
