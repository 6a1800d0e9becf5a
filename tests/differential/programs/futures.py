"""concurrent.futures: threads and processes, callbacks, exceptions, initializers."""

import concurrent.futures
import multiprocessing
import traceback

from tinyrl import Trainer, score


def fails():
    raise ValueError("fails")


if __name__ == "__main__":
    Trainer().fit()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        print(list(pool.map(score, [["a"], ["bb"]])), pool.submit(Trainer().update, lambda: 5).result())
        future = pool.submit(Trainer().update, fails)
        print(repr(future.exception()))
        future.add_done_callback(lambda _: print("called back"))
    for how in ("fork", "spawn"):
        context = multiprocessing.get_context(how)
        with concurrent.futures.ProcessPoolExecutor(2, context, initializer=score, initargs=(["i"],)) as pool:
            print(list(pool.map(score, [["a"], ["bb"]])), pool.submit(Trainer().fit).result())
            future = pool.submit(Trainer().update, fails)
            # The traceback has another line if `result` has to wait.
            concurrent.futures.wait([future])
            try:
                future.result()
            except ValueError:
                traceback.print_exc()
