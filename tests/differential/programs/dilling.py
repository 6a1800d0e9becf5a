#: needs: dill
"""Functions pickled by value with dill, with the globals that they use."""

import dill
from tinyrl import Trainer, score

print(dill.loads(dill.dumps(score))(["abc"]))
print(dill.loads(dill.dumps(Trainer("x"))).fit())


def mine(inside):
    return Trainer().update(inside)


print(dill.loads(dill.dumps(mine))(lambda: 5))
print(dill.loads(dill.dumps(mine, recurse=True))(lambda: 6))
print(dill.pickles(Trainer.update), dill.pickles(score, exact=True))
