"""Limits of single flags: numbers and texts that no flag takes."""

import typing

import pytest

from megafp8.config import build_config
from megafp8.config.config import GROUPS, field_table, flag_of, group_of, has_flag
from megafp8.config.flags import spec_of, value_type
from megafp8.config.validate.limits import ABOVE_ZERO, AT_LEAST, AT_MOST, BELOW_ONE, REQUIRED
from tests.config.conftest import SMALL


@pytest.mark.parametrize("name", REQUIRED)
def test_required_flags(parse, name):
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ValueError, match=f"{flag} is required"):
        parse(without=(flag,))


def values_with(name, value):
    default = field_table()[name][1].default
    return build_config(env={}, **SMALL | {name: (value,) if isinstance(default, tuple) else value})


@pytest.mark.parametrize(("name", "low"), [(name, low) for low, names in AT_LEAST.items() for name in names])
def test_lower_limits(name, low):
    with pytest.raises(ValueError, match=f"{flag_of(name)} .*: give {low} or more"):
        values_with(name, low - 1)


@pytest.mark.parametrize(("name", "high"), [(name, high) for high, names in AT_MOST.items() for name in names])
def test_upper_limits(name, high):
    with pytest.raises(ValueError, match=f"{flag_of(name)} .*: give {high} or less"):
        values_with(name, high + 1)


def fields_of(kind):
    hints = {n: typing.get_type_hints(GROUPS[group])[n] for n, (group, _) in field_table().items() if has_flag(n)}
    return [n for n, hint in hints.items() if value_type(hint) is kind]


@pytest.mark.parametrize("name", fields_of(int))
def test_no_integer_is_unlimited(name):
    """Nothing overflows, or hangs, over a slip of the finger."""
    with pytest.raises(ValueError, match="--.*: give [0-9]+ or less"):
        values_with(name, 10**20)


@pytest.mark.parametrize("name", fields_of(float))
def test_no_float_leaves_fp32(name):
    for value in (float("nan"), float("inf"), -float("inf"), 1e39, -1e39):
        with pytest.raises(ValueError, match="--.*: (give|is infinite in FP32; give)"):
            values_with(name, value)
    if name in ABOVE_ZERO:
        with pytest.raises(ValueError, match="is 0 in FP32"):
            values_with(name, 1e-45)


@pytest.mark.parametrize("name", [n for n in fields_of(str) if spec_of(field_table()[n][1]).choices is None])
@pytest.mark.parametrize("text", ["", " ", "a\0b"])  # "" passes where it is the default, as W&B's flags have it
def test_no_text_is_empty(name, text):
    """An unset variable in a script (`--load "$LOAD"`) must not mean the working directory."""
    several = "tuple" in str(typing.get_type_hints(GROUPS[group_of(name)])[name])
    if text == field_table()[name][1].default:
        assert name.startswith("wandb_")
        return
    with pytest.raises(ValueError, match=f"{flag_of(name)} .*empty"):
        build_config(env={}, **SMALL | {name: (text,) if several else text})


@pytest.mark.parametrize("text", ["", "0", "-1", "two", "1.5"])
def test_world_size_of_the_environment(parse, text):
    with pytest.raises(ValueError, match="WORLD_SIZE='.*torchrun"):
        parse(env={"WORLD_SIZE": text})


@pytest.mark.parametrize("name", ABOVE_ZERO + BELOW_ONE)
@pytest.mark.parametrize("value", [-0.5, float("nan"), float("inf")])
def test_open_limits(name, value):
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} .*: give "):
        values_with(name, value)


@pytest.mark.parametrize("name", BELOW_ONE)
def test_probabilities_stay_below_one(name):
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} 1.0: give 0 or more, and less than 1"):
        values_with(name, 1.0)
