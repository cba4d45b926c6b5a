"""The plan: every name once, on either side; what is left over, or of another shape, is an error. CASES 27."""

import pytest

from megafp8.checkpoint.hf import FAMILIES
from megafp8.checkpoint.hf.layouts import STACKED
from megafp8.checkpoint.hf.rules import Rule, check_sources, make_plan
from megafp8.config.model import ModelConfig

MODEL = ModelConfig(num_layers=2, num_query_groups=1, kv_channels=4)
RULES = (
    Rule("embedding.weight", "embed.weight"),
    Rule("layers.{i}.fc1.{field}", ("model.{i}.gate.{field}", "model.{i}.up.{field}"), STACKED),
    Rule("layers.{i}.experts.{e}.fc2.weight", "model.{i}.expert.{e}.weight"),
    Rule("mtp.{k}.norm.weight", "model.{mtp}.norm.weight"),
)
SHAPES = {
    "embedding.weight": (5, 3),
    "layers.1.fc1.weight": (2, 6, 3),
    "layers.1.fc1.bias": (2, 6),
    "layers.0.experts.12.fc2.weight": (3, 6),
    "mtp.1.norm.weight": (3,),
}
SOURCES = {
    "embed.weight": (5, 3),
    "model.1.gate.weight": (6, 3),
    "model.1.up.weight": (6, 3),
    "model.1.gate.bias": (6,),
    "model.1.up.bias": (6,),
    "model.0.expert.12.weight": (3, 6),
    "model.3.norm.weight": (3,),
}


def test_names_and_shapes():
    plan = make_plan(RULES, SHAPES, MODEL)
    assert [entry.name for entry in plan] == sorted(SHAPES)
    assert {n: s for entry in plan for n, s in zip(entry.parts, entry.shapes, strict=True)} == SOURCES
    check_sources(plan, SOURCES, "dir")


def test_a_name_of_ours_without_a_rule():
    with pytest.raises(ValueError, match=r"'layers.0.fc3.weight' has no place"):
        make_plan(RULES, {**SHAPES, "layers.0.fc3.weight": (3,)}, MODEL)
    with pytest.raises(ValueError, match="has no place"):
        make_plan(RULES, {"layers.x.fc1.weight": (2, 3)}, MODEL)


def test_a_dot_in_a_pattern_is_a_dot():
    with pytest.raises(ValueError, match="has no place"):
        make_plan(RULES, {"embeddingXweight": (3,)}, MODEL)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model.1.up.bias": None}, "dir lacks 'model.1.up.bias'"),
        ({"model.1.other.bias": (6,)}, "dir holds 'model.1.other.bias'"),
        ({"model.1.up.bias": (7,)}, r"'model.1.up.bias' has the shape \[7\], its config.json makes it \[6\]"),
    ],
)
def test_what_does_not_match_is_named(change, text):
    found = {name: shape for name, shape in {**SOURCES, **change}.items() if shape is not None}
    with pytest.raises(ValueError, match=text):
        check_sources(make_plan(RULES, SHAPES, MODEL), found, "dir")


def test_ignored_names():
    plan = make_plan(RULES, SHAPES, MODEL)
    check_sources(plan, {**SOURCES, "a.rotary_emb.inv_freq": (2,)}, "dir", ignored=(r".*\.inv_freq",))


def test_two_rules_for_one_tensor_are_our_own_mistake():
    with pytest.raises(AssertionError):
        make_plan((*RULES, Rule("layers.{i}.fc1.weight", "x")), SHAPES, MODEL)
    with pytest.raises(AssertionError):
        make_plan((Rule("a", "x"), Rule("b", "x")), {"a": (1,), "b": (1,)}, MODEL)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.model_type)
def test_rules_of_a_family_name_each_tensor_once(family):
    theirs = [n for rule in family.rules for n in ((rule.theirs,) if isinstance(rule.theirs, str) else rule.theirs)]
    assert len(set(theirs)) == len(theirs)
    assert len({rule.ours for rule in family.rules}) == len(family.rules)
