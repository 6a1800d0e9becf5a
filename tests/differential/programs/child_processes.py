#: python: {script} fork
#: python: {script} spawn
#: python: {script} forkserver
"""multiprocessing by each method of start: processes, pools, queues, pipes, proxies of managers."""

import multiprocessing
import sys

from tinyrl import Trainer, score


def work(queue, number):
    queue.put((number, Trainer().fit(1), score(["a" * number])))


def leaves(code):
    Trainer().fit(1, lambda: exit(code))


if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    Trainer().fit()
    queue = context.Queue()
    processes = [context.Process(target=work, args=(queue, number)) for number in range(3)]
    for process in processes:
        process.start()
    print(sorted(queue.get(timeout=60) for _ in processes))
    for process in processes:
        process.join()
    print([process.exitcode for process in processes])
    with context.Pool(2) as pool:
        print(pool.map(score, [["a"], ["bb"]]), pool.apply(Trainer.reward, ("abc",)), pool.map(len, [[1]]))
        print(pool.apply_async(Trainer.build, ("x",)).get(60).name)
        try:
            pool.apply(score, (5,))
        except TypeError as error:
            print(error, type(error.__cause__).__name__)
    process = context.Process(target=leaves, args=(9,))
    process.start()
    process.join()
    print(process.exitcode, multiprocessing.active_children())
