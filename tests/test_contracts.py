"""Every hook of every recipe, looked for in the stored signatures of each release that it is for."""

from __future__ import annotations

from typing import Any

import pytest
import stored
from helpers import ROOT
from stored import Contract, NotFound, parameters

from autoprof.behaviours import Behaviour
from autoprof.recipe import BoundHook, fits

_LARGEST_FILE = 25_000
RELEASES = [(target, version) for target in stored.releases() for version in stored.versions(target)]


def covered(target: str, version: str) -> list[BoundHook]:
    """The hooks that a recipe promises for a release."""
    return [
        hook
        for hook in stored.hooks(target)
        if fits(version, hook.recipe.versions) and fits(version, hook.hook.versions)
    ]


CASES: list[Any] = [
    pytest.param(target, version, hook, id=f"{hook.key}-{version}")
    for target, version in RELEASES
    for hook in covered(target, version)
]


def installs(hook: BoundHook) -> bool:
    """Whether the hook's behaviour changes what it finds in place, such as a class."""
    return type(hook.behaviour).install is not Behaviour.install


def supplied(target: str, version: str, hook: BoundHook) -> bool:
    """Whether the hook's attribute is one that the release lacks and the behaviour adds."""
    contract = stored.contract(target, version)
    adds = type(hook.behaviour).supply is not Behaviour.supply
    return adds and not contract.has(hook.hook.module, hook.hook.attribute)


def cases(behaviour: str) -> list[Any]:
    """The cases whose behaviour's name ends so."""
    return [case for case in CASES if case.values[2].hook.behaviour.endswith(behaviour)]


@pytest.mark.parametrize(("target", "version", "hook"), CASES)
def test_a_hook_finds_its_target(target: str, version: str, hook: BoundHook) -> None:
    contract = stored.contract(target, version)
    if supplied(target, version, hook):
        assert contract.lineage(hook.hook.module, hook.hook.attribute.partition(".")[0])
        return
    found = contract.find(hook.hook.module, hook.hook.attribute)
    if "parameters" not in found:
        assert installs(hook), f"{hook.hook.attribute} is a class, and {hook.hook.behaviour} wraps functions"
        return
    assert isinstance(found["async"], bool)
    assert not found.get("generator"), "a wrapper would end before the generator begins"
    decorators = found.get("decorators", [])
    assert "property" not in decorators
    assert "abc.abstractmethod" not in decorators, "what overrides it would be called instead"
    looks_at_its_caller = [name for name in decorators if name == "verl.utils.ray_utils.auto_await"]
    assert looks_at_its_caller == ([hook.hook.rewrap] if hook.hook.rewrap else [])


@pytest.mark.parametrize(("target", "version", "hook"), CASES)
def test_attributes_that_options_name_are_there(target: str, version: str, hook: BoundHook) -> None:
    if "." not in hook.hook.attribute:
        return
    contract = stored.contract(target, version)
    owner = hook.hook.attribute.partition(".")[0]
    missing = [name for name in stored.attribute_options(hook) if not contract.sets(hook.hook.module, owner, name)]
    assert not missing, f"{contract.name}: nothing sets {', '.join(missing)} on {owner}"


@pytest.mark.parametrize(("target", "version", "hook"), CASES)
def test_paths_of_options_begin_with_a_parameter(target: str, version: str, hook: BoundHook) -> None:
    if installs(hook) or supplied(target, version, hook):
        return
    found = stored.contract(target, version).find(hook.hook.module, hook.hook.attribute)
    names = {path.partition(".")[0] for path in stored.option_paths(hook)}
    assert names <= {*parameters(found), "self"} or "**" in parameters(found)


@pytest.mark.parametrize(("target", "version", "hook"), cases(".server"))
def test_requests_travel_by_any_keyword(target: str, version: str, hook: BoundHook) -> None:
    if supplied(target, version, hook):
        return
    found = stored.contract(target, version).find(hook.hook.module, hook.hook.attribute)
    assert found["async"], "the behaviour awaits the engine"
    assert "**" in parameters(found)


@pytest.mark.parametrize(("target", "version", "hook"), cases(".engine"))
def test_engines_are_awaited(target: str, version: str, hook: BoundHook) -> None:
    assert stored.contract(target, version).find(hook.hook.module, hook.hook.attribute)["async"]


@pytest.mark.parametrize(("target", "version", "hook"), cases("rollout.around"))
def test_validation_is_told_by_an_argument(target: str, version: str, hook: BoundHook) -> None:
    found = stored.contract(target, version).find(hook.hook.module, hook.hook.attribute)
    name = str(hook.hook.options.get("unless", "")).partition(".")[0]
    assert not name or name in parameters(found)


@pytest.mark.parametrize("target", list(stored.releases()))
def test_all_releases_are_stored(target: str) -> None:
    assert stored.versions(target) == stored.releases()[target].releases


@pytest.mark.parametrize("target", [target for target in stored.releases() if stored.hooks(target)])
def test_a_recipe_is_for_some_stored_release(target: str) -> None:
    for hook in stored.hooks(target):
        assert any(hook in covered(target, version) for version in stored.versions(target)), hook.key


@pytest.mark.parametrize(("target", "version"), RELEASES)
def test_files_are_small_facts(target: str, version: str) -> None:
    text = stored.path(target, version).read_text()
    assert len(text) < _LARGEST_FILE
    assert str(ROOT) not in text
    assert "://" not in text


def test_what_is_missing_is_said() -> None:
    contract = Contract("vllm", "0.9.2")
    with pytest.raises(NotFound, match=r"vllm 0\.9\.2 has no module vllm\.profiler\.wrapper"):
        contract.find("vllm.profiler.wrapper", "TorchProfilerWrapper")
    with pytest.raises(NotFound, match=r"nothing is stored of vllm\.nowhere in vllm 0\.9\.2; run make contracts"):
        contract.find("vllm.nowhere", "Nothing")
    with pytest.raises(NotFound, match=r"vllm\.v1\.engine\.async_llm has no AsyncLLM\.sing"):
        contract.find("vllm.v1.engine.async_llm", "AsyncLLM.sing")
    assert not contract.has("vllm.v1.engine.async_llm", "NoClass.sing")
