"""Texts of recipes: valid ones, and generated ones that are nearly valid."""

from __future__ import annotations

from hypothesis import strategies as st

from autoprof.hooks.behaviour import BEHAVIOURS
from tests.support.helpers import ROOT

GOOD = """
target = "thing"
[[hook]]
name = "work"
module = "thing.work"
attribute = "Worker.update"
behaviour = "stage"
options = { stage = "update_actor", role = "actor" }
"""


# Name, attribute (as `module:attribute` too), behaviour, and options.
Hook = tuple[str, str, str, str]


def recipe(target: str, *hooks: Hook) -> str:
    """Return a recipe with these hooks."""
    text = f'target = "{target}"\n'
    for name, place, behaviour, options in hooks:
        module, _, attribute = place.rpartition(":")
        text += f'[[hook]]\nname = "{name}"\nmodule = "{module or target}"\nattribute = "{attribute}"\n'
        text += f'behaviour = "{behaviour}"\noptions = {{ {options} }}\n'
    return text


keys = ["target", "hook", "versions", "distributions", "passive", "name", "module", "attribute", "behaviour", "options"]
values = st.recursive(
    st.one_of(st.text(max_size=8), st.sampled_from(["thing", "thing.a", "stage", "step.wrap"]), st.integers()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(keys), inner, max_size=6)),
    max_leaves=12,
)

OWN = sorted((ROOT / "recipes").glob("*.toml"))


words = st.sampled_from(["thing", "thing.a", "self.x", "", "a b", "work", ">=1", "step", "stage", "step.begin", "span"])
scalars = words | st.integers(-1, 1) | st.booleans() | st.none()
loose = st.recursive(scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2))
near_hooks = st.fixed_dictionaries(
    {"name": words, "module": words, "attribute": words},
    optional={
        "behaviour": st.sampled_from(sorted(BEHAVIOURS)),
        "versions": loose,
        "rewrap": words,
        "options": loose
        | st.dictionaries(st.sampled_from(["stage", "role", "rank", "when", "number", "replicas", "action"]), loose),
    },
)
