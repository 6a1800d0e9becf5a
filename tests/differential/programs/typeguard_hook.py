#: hooks: none
#: needs: typeguard
"""typeguard's import hook on a hooked package."""

from typeguard import install_import_hook

with install_import_hook("tinyrl"):
    from tinyrl import Trainer, score
print(Trainer().fit(), score(["a"]), Trainer.build().name)
