#: needs: wrapt
"""wrapt of the user on the same functions, before and after autoprof's hooks, and its post-import hooks."""

import sys

import wrapt


@wrapt.when_imported("tinyrl.trainer")
def patch(module):
    wrapt.wrap_function_wrapper(
        module, "Trainer.update", lambda wrapped, instance, args, kwargs: ("first", wrapped(*args, **kwargs))
    )


from tinyrl import Trainer, score

wrapt.wrap_function_wrapper(
    "tinyrl.trainer", "Trainer.generate", lambda wrapped, instance, args, kwargs: wrapped(*args)
)
print(Trainer().fit())


@wrapt.decorator
def around(wrapped, instance, args, kwargs):
    return "around", wrapped(*args, **kwargs)


print(around(score)(["a"]), wrapt.ObjectProxy(Trainer()).fit())
wrapt.register_post_import_hook(lambda module: print("hook", module.__name__), "tinyrl")
wrapt.register_post_import_hook(lambda module: print("hook", module.__name__), "colorsys")
import colorsys

print(Trainer.build("x").name, "colorsys" in sys.modules)
