"""Functions, classes, instances and bound methods, pickled and unpickled."""

import copy
import pickle

from tinyrl import Trainer, evaluate, score

for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
    for thing in (score, evaluate, Trainer, Trainer.build, Trainer.update, Trainer.reward, Trainer.agenerate):
        assert pickle.loads(pickle.dumps(thing, protocol)) == thing
trainer = Trainer("a")
trainer.fit()
again = pickle.loads(pickle.dumps(trainer))
print(vars(again) == vars(trainer), pickle.loads(pickle.dumps(again.update))(), len(pickle.dumps(trainer)))
print(len(pickle.dumps([Trainer.update, score, trainer.update])))
for copied in (copy.copy(trainer), copy.deepcopy(trainer)):
    copied.fit(1)
    print(copied.seen, trainer.seen)
print(copy.copy(score) is score, copy.deepcopy(Trainer.update) is Trainer.update)
print(pickle.dumps(score))
