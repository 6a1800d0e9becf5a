"""help() and pydoc of hooked functions and modules."""

import pydoc

import tinyrl.trainer
from tinyrl import Trainer, score

for thing in (score, Trainer, Trainer.update, tinyrl.trainer):
    print(pydoc.render_doc(thing, renderer=pydoc.plaintext))
print(score(["a"]))
