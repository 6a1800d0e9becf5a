"""Results, arguments and exceptions of coroutines, which are freed with the user's last reference."""

import asyncio
import gc
import weakref

from tinyrl import Trainer


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
