"""umask, and the modes of files that a program creates."""

import os

from tinyrl import Trainer

os.umask(0o027)


def work():
    os.makedirs("folder/inner", exist_ok=True)
    open("folder/file", "w").close()
    return os.umask(0o027)


print([oct(mask) for mask in Trainer().fit(inside=work)], oct(os.umask(0)))
os.umask(0o777)
print(Trainer().fit())
os.umask(0o022)
