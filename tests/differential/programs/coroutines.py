#: functions: together
"""Coroutines, tasks, event loops and context variables."""

import asyncio
import concurrent.futures
import contextlib
import contextvars
import gc
import sys
import threading
import traceback
import weakref

from tinyrl import Trainer


def async_generators():
    """Async generators, async contexts and comprehensions with stages inside."""
    trainer = Trainer()

    async def samples(count):
        try:
            for number in range(count):
                yield await trainer.sample(number)
        finally:
            print("ends", await trainer.agenerate())

    @contextlib.asynccontextmanager
    async def within():
        yield await trainer.agenerate()
        print("leaves")

    async def main():
        print([each async for each in samples(3)])
        generator = samples(5)
        print(await anext(generator))
        await generator.aclose()
        async with within() as found:
            print(found)
        left = samples(4)
        print(await left.__anext__())
        print(await trainer.afit())

    asyncio.run(main())


def async_stages():
    """Coroutines: awaited, gathered, cancelled, timed out, shielded, in task groups, as callbacks."""
    trainer = Trainer()

    async def slow(*_):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError as error:
            print("cancelled", error.args)
            raise

    async def fails(*_):
        await asyncio.sleep(0)
        raise ValueError("fails")

    async def main():
        print(await trainer.afit(), await trainer.agenerate(), await trainer.sample(3))
        task = asyncio.create_task(trainer.agenerate(slow), name="named")
        await asyncio.sleep(0.3)
        task.cancel("message")
        try:
            await task
        except asyncio.CancelledError as error:
            print(error.args, task.cancelled(), task.get_name())
        try:
            async with asyncio.timeout(0.3):
                await trainer.agenerate(slow)
        except TimeoutError as error:
            print(repr(error), type(error.__cause__))
        try:
            await asyncio.wait_for(trainer.sample(1, slow), 0.3)
        except TimeoutError as error:
            print(repr(error))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(trainer.agenerate(slow))
                group.create_task(trainer.sample(1, fails))
        except ExceptionGroup as group:
            print(group.exceptions)
            traceback.print_exc()
        print(await asyncio.gather(*(trainer.sample(n, fails) for n in range(3)), return_exceptions=True))
        shielded = asyncio.shield(trainer.agenerate())
        print(await shielded)
        coroutine = trainer.agenerate(slow)
        print(asyncio.iscoroutine(coroutine), coroutine.__name__, coroutine.__qualname__)
        coroutine.close()
        print(len(asyncio.all_tasks()))

    asyncio.run(main())


#: differs: a span of a sample sets a context variable of autoprof
def context_contents():
    """Names of the context variables, as a program that copies contexts sees them."""
    seen = []

    def look(*_):
        seen.append(sorted(variable.name for variable in contextvars.copy_context()))

    async def alook(*args):
        look()

    Trainer().fit(inside=look)
    asyncio.run(Trainer().afit(inside=alook))
    asyncio.run(Trainer().sample(3, alook))
    look()
    print(seen)


def context_variables():
    """Context variables that are set in stages and read outside, in tasks and in copies."""
    number = contextvars.ContextVar("number", default=0)
    trainer = Trainer()
    trainer.update(number.set, 1)
    print(number.get())

    async def sets(*_):
        number.set(number.get() + 10)
        return number.get()

    async def main():
        print(await trainer.agenerate(sets), number.get())
        print(await asyncio.create_task(trainer.sample(1, sets)), number.get())
        print(await asyncio.gather(*(trainer.sample(n, sets) for n in range(3))), number.get())
        token = number.set(7)
        await trainer.agenerate(sets)
        number.reset(token)
        print(number.get())

    asyncio.run(main())
    context = contextvars.copy_context()
    print(context.run(trainer.update, number.get), len(list(contextvars.Context())))
    context.run(lambda: trainer.update(number.set, 99))
    print(number.get(), context[number])


#: differs: asyncio shows the place of a wrapped method, because it has __wrapped__, but not of a plain one
def callback_repr():
    """Name of a failing callback in asyncio's debug mode."""

    async def main():
        loop = asyncio.get_running_loop()
        loop.set_debug(True)
        loop.set_exception_handler(lambda _, said: print(said["message"]))
        loop.call_soon(Trainer().update, int, "x")
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(main())


#: captures: no
def executor_of_ones_own():
    """Default executor of the user: its jobs, and the absence of any other executor."""
    submitted = []

    class Executor(concurrent.futures.ThreadPoolExecutor):
        def submit(self, function, /, *args, **kwargs):
            submitted.append(getattr(function, "__name__", type(function).__name__))
            return super().submit(function, *args, **kwargs)

    async def main():
        loop = asyncio.get_running_loop()
        print(loop._default_executor)
        await Trainer().afit()
        print(loop._default_executor, [thread.name for thread in threading.enumerate()])
        loop.set_default_executor(Executor(2, "mine"))
        await Trainer().afit()
        print(await loop.run_in_executor(None, lambda: "mine"), len(submitted))

    asyncio.run(main())


def executor_shut_down():
    """Coroutines that run after the loop's executor was shut down."""

    async def main():
        await asyncio.get_running_loop().shutdown_default_executor()
        print(await Trainer().afit(), await Trainer().agenerate())

    asyncio.run(main())


def loops_by_hand():
    """Coroutines without asyncio, and loops that are created and closed explicitly."""
    coroutine = Trainer().sample(5)
    turns = 0
    try:
        while True:
            coroutine.send(None)
            turns += 1
    except StopIteration as stop:
        print(stop.value, turns)
    loop = asyncio.new_event_loop()
    print(loop.run_until_complete(Trainer().afit()))
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
    print(loop.is_closed())
    try:
        asyncio.get_running_loop()
    except RuntimeError as error:
        print(error)
    with asyncio.Runner() as runner:
        print(runner.run(Trainer().agenerate()))
        print(runner.run(Trainer().agenerate()))


def never_awaited():
    """Warnings about coroutines that are never awaited, with the place where they were created."""
    Trainer().agenerate()
    gc.collect()
    sys.set_coroutine_origin_tracking_depth(2)
    Trainer().sample(1)
    gc.collect()
    Trainer().fit()


def turns_of_the_loop():
    """Number of turns of the event loop that a coroutine takes, and the order in which tasks end."""
    order = []

    async def main():
        trainer = Trainer()

        async def one(number, call):
            await call
            order.append(number)

        await asyncio.gather(
            one(1, trainer.agenerate()),
            one(2, trainer.sample(1)),
            one(3, asyncio.sleep(0)),
            one(4, trainer.agenerate()),
        )
        task = asyncio.ensure_future(trainer.agenerate())
        turns = 0
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        print(order, turns)

    asyncio.run(main())


def freed_in_time():
    """Results, arguments and exceptions of coroutines, which are freed with the user's last reference."""

    class Model:
        pass

    references = []

    async def works(number=0):
        model = Model()
        references.append(weakref.ref(model))
        await asyncio.sleep(0)
        if number:
            error = ValueError(model)
            references.append(weakref.ref(error))
            raise error
        return model

    async def main():
        trainer = Trainer()
        await trainer.agenerate(works)
        print([each() for each in references])
        for number in (0, 1):
            try:
                await trainer.sample(number, works)
            except ValueError:
                pass
        print([each() is None for each in references])

    gc.disable()
    asyncio.run(main())
    print([each() is None for each in references])


for name in sys.argv[1].split(","):
    print(name)
    globals()[name]()
