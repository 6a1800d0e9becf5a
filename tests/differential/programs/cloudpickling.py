#: needs: cloudpickle
"""Classes by value, closures over wrapped functions and bound methods, pickled as Ray does it."""

import pickle

import cloudpickle
import tinyrl.trainer
from tinyrl import Trainer, score


class Mine(Trainer):
    def update(self, inside=None):
        return "mine", super().update(), score(["abc"])


mine = pickle.loads(cloudpickle.dumps(Mine))
print(mine().fit(), mine.__mro__[1] is Trainer, mine.__name__)
print(pickle.loads(cloudpickle.dumps(lambda: score(["a", "bb"])))())
print(pickle.loads(cloudpickle.dumps(Mine("b").update))())
cloudpickle.register_pickle_by_value(tinyrl.trainer)
other = pickle.loads(cloudpickle.dumps(Trainer))
print(other is Trainer, other.__qualname__, other().fit(1), other.reward("abc", 2), other.build().name)
print(pickle.loads(cloudpickle.dumps(score))(["abc"]))
