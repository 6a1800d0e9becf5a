#: captures: no
"""200 concurrent threads in stages."""

import threading

from tinyrl import Trainer, evaluate, score

together = threading.Barrier(200)
found = []
local = threading.local()


def work(number):
    local.number = number
    together.wait()
    trainer = Trainer(str(number))
    for _ in range(3):
        found.append((evaluate(lambda: local.number), trainer.update(lambda: number), score(["x" * number])[0]))


threads = [threading.Thread(target=work, args=(number,)) for number in range(200)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(sorted(found) == sorted([(number,) * 3 for number in range(200)] * 3), threading.active_count())
print([thread.name for thread in threading.enumerate()])
