#: needs: beartype
"""Import hook of beartype on a hooked package."""

from beartype.claw import beartype_package

beartype_package("tinyrl")
from tinyrl import Trainer, score

print(Trainer().fit(), score(["a"]), Trainer.build().name, Trainer.reward("abc"))
