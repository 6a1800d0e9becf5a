"""Hooked functions replaced by unittest.mock."""

from unittest import mock

import tinyrl.trainer
from tinyrl import Trainer

with mock.patch.object(Trainer, "update", return_value=5) as patched:
    print(Trainer().fit(), patched.call_count)
with mock.patch.object(Trainer, "update", autospec=True) as patched:
    patched.return_value = 6
    print(Trainer().fit(), patched.call_args_list[0].args[1:])
    try:
        Trainer().update(no_such=1, inside=2, other=3)
        patched(1, 2, 3)
        Trainer.update()
    except TypeError as error:
        print(error)
with mock.patch("tinyrl.trainer.score", autospec=True) as patched:
    try:
        tinyrl.trainer.score(1, 2, 3)
    except TypeError as error:
        print(error)
with mock.patch.object(Trainer, "agenerate") as patched:
    print(type(patched).__name__)
with mock.patch.object(Trainer, "update", side_effect=Trainer.update, autospec=True) as patched:
    try:
        print(Trainer().update(lambda: 8))
    except RecursionError as error:
        print(error)
with mock.patch.object(Trainer, "generate", wraps=Trainer().generate) as patched:
    print(Trainer().fit(1), patched.called)
spec = mock.create_autospec(Trainer)
print(isinstance(spec(), Trainer), type(spec.return_value.agenerate).__name__, type(spec.reward).__name__)
print(Trainer().fit(1), Trainer.build().name)
