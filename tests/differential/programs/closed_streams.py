#: unset: PYTHONUNBUFFERED
"""Descriptors 0, 1 and 2 closed, with text in the buffer of standard output."""

import os
import subprocess
import sys
import time


def close(numbers):
    print("left in the buffer")
    for number in numbers:
        os.close(int(number))


def at_the_end(numbers):
    Trainer().fit()
    close(numbers)


def in_a_stage(numbers):
    trainer = Trainer()
    trainer.update(lambda: close(numbers))
    trainer.fit()
    # autoprof must not use the lowest free numbers.
    with open("numbers", "w") as said:
        print([os.open(os.devnull, os.O_RDWR) < 3 for _ in numbers], file=said)


def redirected(numbers):
    trainer = Trainer()
    trainer.update(lambda: close(numbers))
    file = os.open("own", os.O_WRONLY | os.O_CREAT)
    for number in numbers:
        os.dup2(file, int(number))
    trainer.fit()


def daemon(numbers):
    Trainer().fit()
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    os.closerange(0, 256)
    print("left in the buffer")
    Trainer().fit()
    # The parent waits for this file.
    with open("part", "w") as said:
        print([os.open(os.devnull, os.O_RDWR) for _ in range(3)], file=said)
    os.rename("part", "daemon")


def executed(numbers):
    Trainer().fit()
    close(numbers)
    os.execv(sys.executable, [sys.executable, "-c", "import os; os.mkdir('executed'); print('says')"])


def main():
    for work in (at_the_end, in_a_stage, redirected, executed):
        for numbers in ("1", "012"):
            done = subprocess.run([sys.executable, __file__, work.__name__, numbers], stdout=subprocess.PIPE)
            print(work.__name__, numbers, done.returncode, done.stdout)
            for name in ("numbers", "own"):
                if os.path.exists(name):
                    print(open(name).read())
                    os.unlink(name)
            if os.path.exists("executed"):
                os.rmdir("executed")
                print("executed")
    print(subprocess.run([sys.executable, __file__, daemon.__name__, ""]).returncode)
    while not os.path.exists("daemon"):
        time.sleep(0.01)
    print(open("daemon").read())


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        from tinyrl import Trainer

        globals()[sys.argv[1]](sys.argv[2])
