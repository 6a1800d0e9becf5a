"""Lookup of all hooks in the metadata and the source of the installed targets, of which nothing is imported."""

from __future__ import annotations

from typing import Any

from autoprof.capture import profilers
from autoprof.cli.recipes import places
from autoprof.cli.recipes.source import Missing, Sources, Unknown
from autoprof.config.settings import Settings
from autoprof.hooks import behaviour as behaviours
from autoprof.hooks import recipe
from autoprof.hooks.recipe import BoundHook, RecipeError, installed_version
from autoprof.hooks.versions import fits

# Of a hook whose function the source has, and of one of which it does not tell.
FOUND, UNKNOWN = "found", "unknown"
# Where verl asks for vLLM by the name of its distribution (0.5 to 0.9.1).
_ASKS_FOR_VLLM = "verl.third_party.vllm"


def look_up(settings: Settings) -> dict[str, Any]:
    """Return the hooks with their states, versions and errors, in the form of `hooks/*.json`, and the tool."""
    sources = Sources()
    hooks: dict[str, dict[str, str]] = {}
    errors: dict[str, dict[str, str]] = {}
    versions: dict[str, str] = {}
    for file in places.files(settings.recipes):
        try:
            bound = recipe.load(file.path)
        except RecipeError as error:
            errors[file.name] = {"last": str(error)}
            continue
        for hook in bound:
            target = hook.recipe.target
            if target not in versions:
                versions[target] = installed_version(hook.recipe)
            state, reason = _state(hook, versions[target], settings, sources)
            hooks[hook.key] = {"state": state, "reason": reason}
    there = {target: version for target, version in versions.items() if version or sources.installed(target)}
    if not settings.disabled("verl", ""):
        errors |= _renamed(there, sources)
    return {
        "hooks": hooks,
        "errors": errors,
        "versions": there,
        "absent": sorted(versions.keys() - there.keys()),
        "tool": profilers.outlook(settings.tool, imports=False),
    }


def _state(hook: BoundHook, version: str, settings: Settings, sources: Sources) -> tuple[str, str]:
    """Return the state of a hook and its reason, as a process that imports the target would have them."""
    target = hook.recipe.target
    if any(settings.disabled(name, hook.hook.name) for name in (target, hook.file)):
        return "skipped", "AUTOPROF_DISABLE names it"
    if not version and not sources.installed(target):
        return "skipped", f"{target} is not installed"
    if not fits(version, hook.hook.versions):
        return "skipped", f"{target} is {version}, the hook is for {hook.hook.versions}"
    outside = "" if fits(version, hook.recipe.versions) else f"{version} is outside the recipe's range "
    try:
        sources.module(hook.hook.module)
        sources.find(hook.hook.module, hook.hook.attribute)
    except Missing as error:
        if type(hook.behaviour).supply is behaviours.Behaviour.supply:
            # A recipe promises its hooks for the releases in its range only.
            return ("skipped" if outside else "failed"), f"{error}"
    except Unknown as error:
        return UNKNOWN, f"{error}"
    return FOUND, f"{outside}{hook.recipe.versions}" if outside else ""


def _renamed(versions: dict[str, str], sources: Sources) -> dict[str, dict[str, str]]:
    """Return what is wrong where vLLM is installed under a name by which verl does not find it."""
    version = versions.get("vllm", "")
    try:
        sources.module(_ASKS_FOR_VLLM)
    except (Missing, Unknown):
        return {}
    if not version or installed_version(recipe.Recipe(target="vllm", hook=[])):
        return {}
    text = (
        f"vLLM {version} is installed, but under another name than vllm, by which {_ASKS_FOR_VLLM} asks for it: "
        "verl can't import its vLLM servers; install the distribution vllm"
    )
    return {"verl": {"last": text}}
