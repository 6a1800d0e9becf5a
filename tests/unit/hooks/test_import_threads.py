"""Imports of hooked packages in several threads. The import system calls finders while it holds its lock."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.helpers import TOML, Python

# Packages whose modules import each other, slowly, and need what autoprof needs, too.
PACKAGE = """
import time
{needs}
time.sleep({pause})
from {name} import one
"""
MODULE = """
import time
time.sleep({pause})
{needs}
class Trainer:
    def train_step(self, number): return number
"""
NEEDS = ["asyncio", "json", "logging.handlers", TOML, "concurrent.futures", "urllib.request", "multiprocessing.pool"]
RECIPE = """
target = "{name}"
hook = [
    {{ name = "one", module = "{name}.one", attribute = "Trainer.train_step", behaviour = "stage", options = {{ stage = "one", role = "actor" }} }},
    {{ name = "two", module = "{name}.sub.two", attribute = "Trainer.train_step", behaviour = "stage", options = {{ stage = "two", role = "actor" }} }},
]
"""  # noqa: E501
CODE = """
import faulthandler, importlib, sys, threading, time
faulthandler.dump_traceback_later(90, exit=True)
names = {names}
ready = threading.Barrier(len(names))
def load(name, pause):
    ready.wait()
    time.sleep(pause)
    for _ in range(100):
        try:
            return importlib.import_module(name)
        except (ImportError, AttributeError, RuntimeError):  # half imported elsewhere, as without autoprof
            time.sleep(0.05)
threads = [threading.Thread(target=load, args=each) for each in names]
for thread in threads: thread.start()
for thread in threads: thread.join()
for name, _ in names:
    module = sys.modules[name]
    if hasattr(module, "Trainer"):
        print(name, hasattr(module.Trainer.train_step, "__wrapped__"), module.Trainer().train_step(3))
"""


def packages(folder: Path, seed: int) -> list[str]:
    """Make packages whose modules import each other. Return the names of all modules."""
    chance = random.Random(seed)
    names = []
    for name in ("alpha", "beta", "gamma", "delta"):
        (folder / name / "sub").mkdir(parents=True)
        needs = "\n".join(f"import {need}" for need in chance.sample(NEEDS, 2))
        pause = chance.choice([0, 0.01, 0.05])
        (folder / name / "__init__.py").write_text(PACKAGE.format(name=name, needs=needs, pause=pause))
        (folder / name / "one.py").write_text(MODULE.format(needs=needs, pause=pause))
        (folder / name / "sub" / "__init__.py").write_text("")
        (folder / name / "sub" / "two.py").write_text(MODULE.format(needs=f"import {name}", pause=pause))
        (folder / f"{name}.toml").write_text(RECIPE.format(name=name))
        names += [name, f"{name}.one", f"{name}.sub", f"{name}.sub.two"]
    chance.shuffle(names)
    return names


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.fault("16 threads import hooked packages", "as without autoprof", "nothing")
def test_hooked_packages_are_imported_in_any_order_in_16_threads(python: Python, tmp_path: Path, seed: int) -> None:
    names = packages(tmp_path, seed)
    chance = random.Random(seed)
    code = CODE.format(names=[(name, chance.choice([0, 0.005, 0.02])) for name in names])
    recipes = ":".join(str(path) for path in tmp_path.glob("*.toml"))
    off = python(code)
    on = python(code, AUTOPROF="1", AUTOPROF_RECIPES=recipes)
    assert on.stdout == off.stdout.replace("False", "True")
    assert on.stderr == ""


# This once hung each time: a finder waited for the parent's import while it held the import system's lock.
@pytest.mark.fault("two threads import Ray and a module of it", "as without autoprof", "nothing")
def test_ray_and_a_module_of_it_are_imported_in_two_threads(python: Python) -> None:
    code = """
import faulthandler, threading, time
faulthandler.dump_traceback_later(90, exit=True)
def first():
    import ray
def second():
    time.sleep(0.05)
    try:
        import ray.actor
    except ImportError:  # as without autoprof: it is half imported
        pass
threads = [threading.Thread(target=first), threading.Thread(target=second)]
threading.excepthook = lambda what: None
for thread in threads: thread.start()
for thread in threads: thread.join()
print("through")
"""
    assert python(code, AUTOPROF="1").stdout == "through\n"


# The first thread stays in `load` till the second would wait for it; without autoprof, nothing happens in between.
PAUSE = """
import faulthandler, importlib, sys, threading, time
faulthandler.dump_traceback_later(90, exit=True)
def at(thread):
    names, frame = set(), sys._current_frames()[thread.ident]
    while frame is not None:
        names.add((frame.f_globals.get("__name__"), frame.f_code.co_name))
        frame = frame.f_back
    return names
finder = next(each for each in sys.meta_path if type(each).__name__ == "Finder")
load, began, errors = finder._load, threading.Event(), []
def slowly(target):
    # The second comes so long after it that the first gets to the module before.
    for thread, (_, process, start) in finder._pauses.items():
        finder._pauses[thread] = (thread, process, start - 1000)
    began.set()
    while not at(second) & {("autoprof._boot.finder", "_wait"), ("importlib._bootstrap", "acquire")}:
        time.sleep(0.01)
    return load(target)
def late():
    began.wait()
    import alpha.one
    assert alpha.one.__spec__.loader is alpha.one.__loader__
finder._load = slowly
threading.excepthook = lambda what: errors.append(f"{what.exc_type.__name__}: {what.exc_value}")
first, second = threading.Thread(target=importlib.import_module, args=["alpha"]), threading.Thread(target=late)
for thread in (second, first): thread.start()
for thread in (first, second): thread.join()
one = sys.modules["alpha.one"]
print(errors, hasattr(one.Trainer.train_step, "__wrapped__"), one is sys.modules["alpha"].one)
"""


@pytest.mark.parametrize("package", ["from alpha.one import Trainer", "importlib.import_module('alpha.one')"])
@pytest.mark.parametrize("module", ["from alpha import ready", "importlib.import_module('alpha')"])
@pytest.mark.fault("a thread imports a module while recipes for it are read", "as without autoprof", "nothing")
def test_a_module_waits_as_long_as_the_import_of_its_package_pauses(
    python: Python, tmp_path: Path, package: str, module: str
) -> None:
    packages(tmp_path, 0)
    (tmp_path / "alpha" / "__init__.py").write_text(f"import importlib\nready = True\n{package}\n")
    (tmp_path / "alpha" / "one.py").write_text(
        MODULE.format(pause=0, needs=f"import importlib\n{module}\nprint('one')")
    )
    result = python(PAUSE, check=False, AUTOPROF="1", AUTOPROF_RECIPES=str(tmp_path / "alpha.toml"))
    assert (result.stdout, result.stderr) == ("one\n[] True True\n", "")


def test_finding_a_module_does_not_load_it(python: Python, tmp_path: Path) -> None:
    packages(tmp_path, 0)
    code = """
import importlib.machinery, importlib.util, sys
spec = importlib.util.find_spec("alpha")
assert isinstance(spec.loader, importlib.machinery.SourceFileLoader)
assert "autoprof.hooks.patching" not in sys.modules
import alpha
assert type(alpha.__spec__.loader) is type(alpha.__loader__) is importlib.machinery.SourceFileLoader
importlib.reload(alpha.one)
print(hasattr(alpha.one.Trainer.train_step, "__wrapped__"))
"""
    assert python(code, AUTOPROF="1", AUTOPROF_RECIPES=str(tmp_path / "alpha.toml")).stdout == "True\n"


def test_recipes_for_what_autoprof_itself_imports(python: Python, tmp_path: Path) -> None:
    options = '{ stage = "x", role = "y" }'
    for target, module, attribute in [
        ("unittest", "unittest.main", "TestProgram.runTests"),
        ("asyncio", "asyncio.runners", "run"),
    ]:
        place = f'name = "x", module = "{module}", attribute = "{attribute}"'
        hook = f'{{ {place}, behaviour = "stage", options = {options} }}'
        (tmp_path / f"{target}.toml").write_text(f'target = "{target}"\nhook = [{hook}]\n')
    recipes = f"{tmp_path / 'asyncio.toml'}:{tmp_path / 'unittest.toml'}"
    wrapped = "'__wrapped__'), hasattr(unittest.main.runTests, '__wrapped__'))"
    code = f"import unittest, asyncio; print(hasattr(asyncio.runners.run, {wrapped}"
    result = python(code, AUTOPROF="1", AUTOPROF_RECIPES=recipes)
    assert (result.stdout, result.stderr) == ("True True\n", "")
