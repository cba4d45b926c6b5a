"""Command line, --config files, round trips, unknown flags, differences."""

import json
import random

import pytest

from megafp8.config import Config, build_config, diff, parse_args
from megafp8.config.config import field_table, flag_of, has_flag
from megafp8.config.strangers import pasted_dash
from tests.config.conftest import SMALL


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_build_config_equals_the_command_line(parse):
    assert build_config(env={}, **SMALL) == parse()


def test_round_trip_is_exact(parse):
    config = parse(
        "--bf16 --fp8-format hybrid --iterations-to-skip 1 2 --keep-modules-in-bf16 x --weight-decay 0.1234567"
    )
    again = Config.from_json(config.to_json())
    assert again == config
    assert again.given == config.given
    assert again.notes == config.notes


def test_rerun_from_args_json(parse, tmp_path):
    config = parse("--hidden-size 128 --swiglu --disable-bias-linear --iterations-to-skip 1 2")
    path = write(tmp_path / "args.json", config.to_json())
    assert parse_args(["--config", path], env={}) == config


def test_rerun_derives_anew(parse, tmp_path):
    """What follows from an overridden flag follows from its new value."""
    path = write(tmp_path / "args.json", parse().to_json())
    config = parse_args(["--config", path, "--hidden-size", "128"], env={})
    assert (config.model.ffn_hidden_size, config.model.kv_channels) == (512, 32)


def test_command_line_overrides_the_file_in_any_order(tmp_path):
    path = write(tmp_path / "c.json", SMALL | {"lr": 0.5, "seed": 7})
    for argv in (["--config", path, "--lr", "0.25"], ["--lr", "0.25", "--config", path]):
        config = parse_args(argv, env={})
        assert (config.optimizer.lr, config.train.seed) == (0.25, 7)


def test_file_takes_flags_names_and_groups(tmp_path):
    content = dict(SMALL)
    del content["hidden_size"], content["lr"]
    content |= {"--hidden-size": 64, "optimizer": {"lr": 1, "min-lr": 0.5}, "disable-bias-linear": True}
    config = parse_args(["--config", write(tmp_path / "c.json", content)], env={})
    assert (config.model.hidden_size, config.optimizer.lr, config.optimizer.min_lr) == (64, 1.0, 0.5)
    assert isinstance(config.optimizer.lr, float)
    assert not config.model.add_bias_linear


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", ("not JSON",)),
        ([1], ("one JSON object",)),
        ({"hiden_size": 3}, ("hiden_size", "hidden_size")),
        ({"hidden_size": "64"}, ("--hidden-size", "int", "'64'")),
        ({"hidden_size": True}, ("--hidden-size", "int", "True")),
        ({"swiglu": 1}, ("--swiglu", "bool", "1")),
        ({"lr": [1]}, ("--lr", "one value")),
        ({"world_size": 4}, ("world_size",)),
        ("", ("not JSON",)),
        ("null", ("one JSON object",)),
        ("[" * 100_000, ("not JSON",)),
        ('{"seed": ' + "9" * 5000 + "}", ("not JSON",)),
        ({"given": [1], "config": {}}, ("one JSON object",)),
        ({"given": {"zz": 1}, "config": {}}, ("unknown key 'zz'",)),
        ({"lr": 10**400}, ("--lr", "too large")),
        ({"fp8_format": "e9m9"}, ("--fp8-format e9m9", "e4m3, hybrid")),
        ({"iterations_to_skip": [True]}, ("--iterations-to-skip", "str", "True")),
        ({"data_path": [["a"]]}, ("--data-path", "str")),
        ({"data_path": "a"}, ("--data-path", "list", "'a'")),
        ({"keep_modules_in_bf16": [None]}, ("--keep-modules-in-bf16", "str", "None")),
    ],
)
def test_bad_files_are_one_line(tmp_path, content, words):
    path = write(tmp_path / "c.json", content)
    with pytest.raises(ValueError) as error:
        parse_args(["--config", path], env={})
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in ("--config", *words)), str(error.value)


def test_file_that_is_no_text(tmp_path):
    (tmp_path / "c.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ValueError, match="--config .*c.json: not JSON"):
        parse_args(["--config", str(tmp_path / "c.json")], env={})


def test_missing_file(tmp_path):
    with pytest.raises(ValueError, match=r"--config .*nowhere.json: No such file"):
        parse_args(["--config", str(tmp_path / "nowhere.json")], env={})


def test_unknown_flags_suggest_the_closest(parse):
    """Every flag with a typing error finds its way back."""
    rng = random.Random(0)
    for name in field_table():
        if not has_flag(name) or len(name) < 8:
            continue
        flag = flag_of(name)
        at = rng.randrange(4, len(flag) - 2)
        wrong = flag[:at] + flag[at + 1] + flag[at] + flag[at + 2 :]
        if wrong == flag:
            continue
        with pytest.raises(ValueError, match="unknown flag") as error:
            parse(f"{wrong} 3")
        assert "did you mean --" in str(error.value), str(error.value)


def test_unknown_flag_without_a_neighbour(parse):
    with pytest.raises(ValueError, match="unknown flag --zzzzzzzz; see --help"):
        parse("--zzzzzzzz")


def test_flags_are_not_abbreviated(parse):
    with pytest.raises(ValueError, match="unknown flag --num-lay; did you mean --num-layers"):
        parse("--num-lay 3")


def test_later_flags_win(parse):
    assert parse("--lr 0.5 --lr 0.25").optimizer.lr == 0.25


def test_diff_names_flags_and_values(parse):
    old, new = parse(), parse("--lr 0.5 --disable-bias-linear --iterations-to-skip 4")
    lines = diff(old, new)
    assert "--lr: 0.001 -> 0.5" in lines
    assert "--disable-bias-linear: True -> False" in lines
    assert "--iterations-to-skip: () -> ('4',)" in lines
    assert diff(old, old) == []


def test_from_json_of_another_version(parse):
    content = json.loads(parse().to_json())
    content["config"]["model"]["number_of_heads"] = 3
    with pytest.raises(ValueError, match="model.number_of_heads"):
        Config.from_dict(content)


@pytest.mark.parametrize("typed", ["\u2014bf16", "\u2013bf16", "\u2013\u2013bf16", "-\u2013bf16", "\u2212\u2212bf16"])
def test_dashes_of_a_word_processor(typed):
    """Told wherever they stand, also where a flag would take them for one of its values."""
    mend = "its dash is none of a keyboard's; type --bf16"
    for argv in ([typed], ["--swiglu", typed], ["--data-path", "a", typed]):
        with pytest.raises(ValueError, match=f"^unexpected argument '{typed}': {mend}$"):
            parse_args(argv, env={})


def test_a_dash_within_a_value_is_a_value():
    assert pasted_dash("a\u2014b") is None
    assert pasted_dash("\u2014 and then") is None
    assert pasted_dash("-1") is None
