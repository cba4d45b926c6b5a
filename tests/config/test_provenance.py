"""args.json: what was given, what it came to, and which code ran."""

import json
import subprocess

import pytest

from megafp8.config import changes, parse_args, read_args, write_args
from megafp8.config.provenance import git_commit


def test_args_json_round_trip(parse, tmp_path):
    config = parse("--bf16 --fp8-format hybrid --transformer-impl local")
    path = tmp_path / "run" / "args.json"
    write_args(config, path)
    assert read_args(path) == config
    content = json.loads(path.read_text())
    assert content["given"]["fp8_format"] == "hybrid"
    assert content["config"]["fp8"]["fp8_recipe"] == "tensorwise"
    assert content["notes"] == list(config.notes)
    assert content["provenance"]["versions"]["torch"]
    assert set(content["provenance"]) >= {"commit", "versions", "python", "platform", "command"}
    assert [p.name for p in path.parent.iterdir()] == ["args.json"]


def test_a_run_starts_again_from_its_args_json(parse, tmp_path):
    config = parse("--seed 5 --lr 0.25")
    write_args(config, tmp_path / "args.json")
    again = parse_args(["--config", str(tmp_path / "args.json")], env={})
    assert again == config


def test_changed_arguments_are_listed(parse):
    lines = changes(parse(), parse("--lr 0.25 --seed 5"))
    assert lines == [
        "changed since the checkpoint: --lr: 0.001 -> 0.25",
        "changed since the checkpoint: --seed: 1234 -> 5",
    ]


@pytest.mark.parametrize("text", ["{", "{}", '{"config": {"nothing": {}}}', '{"config": {"model": 3}}', "[]"])
def test_damaged_file(tmp_path, text):
    (tmp_path / "args.json").write_text(text)
    with pytest.raises(ValueError, match="args.json"):
        read_args(tmp_path / "args.json")


def test_git_commit(tmp_path):
    assert git_commit(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("1")
    for command in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert git_commit(tmp_path) == commit
    (tmp_path / "file").write_text("2")
    assert git_commit(tmp_path) == commit + "-dirty"
