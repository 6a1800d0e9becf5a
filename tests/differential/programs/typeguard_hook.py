#: hooks: none
#: needs: typeguard
"""Import hook of typeguard on a hooked package."""

from typeguard import install_import_hook

with install_import_hook("tinyrl"):
    from tinyrl import Trainer, score
print(Trainer().fit(), score(["a"]), Trainer.build().name)
