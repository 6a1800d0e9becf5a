"""Each hook of each recipe exists in the stored signatures of each release that the hook supports."""

from __future__ import annotations

import functools
import json

import pytest

from autoprof.hooks.behaviour import Behaviour
from autoprof.hooks.recipe import BoundHook, fits
from tests.contracts import signature_files, stored
from tests.contracts.signatures import Facts
from tests.contracts.stored import Contract, NotFound, parameters
from tests.support.helpers import ROOT

_LARGEST_RELEASE = 25_000
RELEASES = [(target, version) for target in stored.releases() for version in stored.versions(target)]


@functools.cache
def covered(target: str, version: str) -> list[BoundHook]:
    """Return the hooks that the recipes have for a release."""
    return [
        hook
        for hook in stored.hooks(target)
        if fits(version, hook.recipe.versions) and fits(version, hook.hook.versions)
    ]


# Releases with hooks. One test checks all hooks of a release, because one test per hook would make thousands.
COVERED = [(target, version) for target, version in RELEASES if covered(target, version)]
covered_releases = pytest.mark.parametrize(("target", "version"), COVERED)


def installs(hook: BoundHook) -> bool:
    """Return True if the hook's behaviour changes an object such as a class, instead of wrapping a function."""
    return type(hook.behaviour).install is not Behaviour.install


def supplied(target: str, version: str, hook: BoundHook) -> bool:
    """Return True if the release lacks the hook's attribute and the behaviour adds it."""
    contract = stored.contract(target, version)
    adds = type(hook.behaviour).supply is not Behaviour.supply
    return adds and not contract.has(hook.hook.module, hook.hook.attribute)


def wrapped(target: str, version: str) -> list[tuple[BoundHook, Facts]]:
    """Return the hooks of a release with the functions that they wrap, without attributes that they add."""
    contract = stored.contract(target, version)
    return [
        (hook, contract.find(hook.hook.module, hook.hook.attribute))
        for hook in covered(target, version)
        if not supplied(target, version, hook)
    ]


def everywhere(behaviour: str) -> list[tuple[BoundHook, Facts]]:
    """Return the hooks of all releases whose behaviour has this suffix, with their functions."""
    found = [each for case in COVERED for each in wrapped(*case) if each[0].hook.behaviour.endswith(behaviour)]
    assert found, f"no recipe uses {behaviour}"
    return found


@covered_releases
def test_the_targets_of_hooks_exist(target: str, version: str) -> None:
    contract = stored.contract(target, version)
    for hook in covered(target, version):
        if supplied(target, version, hook):
            assert contract.lineage(hook.hook.module, hook.hook.attribute.partition(".")[0]), hook.key
    for hook, found in wrapped(target, version):
        if "parameters" not in found:
            assert installs(hook), f"{hook.hook.attribute} is a class, and {hook.hook.behaviour} wraps functions"
            continue
        assert isinstance(found["async"], bool), hook.key
        around, generator = hook.hook.around, found.get("generator", False)
        assert around != "call" or not generator, (
            f"{hook.key}: the wrapper of a generator would end before the generator begins"
        )
        decorators = found.get("decorators", [])
        assert "property" not in decorators, hook.key
        assert "abc.abstractmethod" not in decorators, f"{hook.key}: overriding methods are called instead of this one"
        looks_at_its_caller = [name for name in decorators if name == "verl.utils.ray_utils.auto_await"]
        assert looks_at_its_caller == ([hook.hook.rewrap] if hook.hook.rewrap else []), hook.key


# Attributes that a class of another distribution sets, by target: transformers' Trainer is the base of TRL's trainers.
INHERITED = {"trl": {"model"}}


@covered_releases
def test_attributes_named_in_options_exist(target: str, version: str) -> None:
    contract = stored.contract(target, version)
    for hook in covered(target, version):
        owner, _, method = hook.hook.attribute.partition(".")
        names = stored.attribute_options(hook) if method else set()
        names = names - INHERITED.get(target, set())
        missing = [name for name in names if not contract.sets(hook.hook.module, owner, name)]
        assert not missing, f"{hook.key}, {contract.name}: nothing sets {', '.join(missing)} on {owner}"


@covered_releases
def test_paths_of_options_begin_with_a_parameter(target: str, version: str) -> None:
    for hook, found in wrapped(target, version):
        if not installs(hook):
            names = {path.partition(".")[0] for path in stored.option_paths(hook)}
            assert names <= {*parameters(found), "self"} or "**" in parameters(found), hook.key


def test_servers_accept_any_keyword() -> None:
    for hook, found in everywhere(".server"):
        assert found["async"], f"{hook.key}: the behaviour awaits the engine"
        assert "**" in parameters(found), hook.key


def test_methods_of_engines_are_coroutines() -> None:
    assert [hook.key for hook, found in everywhere(".engine") if not found["async"]] == []


def test_an_argument_marks_validation() -> None:
    for hook, found in everywhere("rollout.around"):
        name = str(hook.hook.options.get("unless", "")).partition(".")[0]
        assert not name or name in parameters(found), hook.key


@pytest.mark.parametrize("target", list(stored.releases()))
def test_all_releases_are_stored(target: str) -> None:
    assert stored.versions(target) == stored.releases()[target].releases


@pytest.mark.parametrize("target", [target for target in stored.releases() if stored.hooks(target)])
def test_each_hook_is_for_a_stored_release(target: str) -> None:
    for hook in stored.hooks(target):
        assert any(hook in covered(target, version) for version in stored.versions(target)), hook.key


@pytest.mark.parametrize(("target", "version"), RELEASES)
def test_the_facts_of_a_release_are_small(target: str, version: str) -> None:
    assert len(json.dumps(stored.store(target).release(version))) < _LARGEST_RELEASE


@pytest.mark.parametrize("target", list(stored.releases()))
def test_files_contain_no_paths_and_urls(target: str) -> None:
    text = signature_files.path(target).read_text()
    assert str(ROOT) not in text
    assert "://" not in text


@pytest.mark.parametrize("target", list(stored.releases()))
def test_a_distinct_module_is_stored_once(target: str) -> None:
    for name, variants in stored.store(target).modules.items():
        releases = [version for variant in variants for version in variant.releases.split()]
        assert sorted(releases) == sorted(set(releases)), name
        assert set(releases) <= set(stored.versions(target)), name
        assert all(
            variant.facts not in [other.facts for other in variants if other is not variant] for variant in variants
        )


def test_errors_name_the_missing_module_or_attribute() -> None:
    contract = Contract("vllm", "0.9.2")
    with pytest.raises(NotFound, match=r"vllm 0\.9\.2 has no module vllm\.profiler\.wrapper"):
        contract.find("vllm.profiler.wrapper", "TorchProfilerWrapper")
    with pytest.raises(NotFound, match=r"module vllm\.nowhere is not stored for vllm 0\.9\.2; run make contracts"):
        contract.find("vllm.nowhere", "Nothing")
    with pytest.raises(NotFound, match=r"vllm\.v1\.engine\.async_llm has no AsyncLLM\.sing"):
        contract.find("vllm.v1.engine.async_llm", "AsyncLLM.sing")
    assert not contract.has("vllm.v1.engine.async_llm", "NoClass.sing")
