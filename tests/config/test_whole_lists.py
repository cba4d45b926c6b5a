"""Flag lists of public scripts, whole and in their own layouts, through `pretrain_gpt.py --dry-run`."""

import pytest

import pretrain_gpt
from tests.config.scripts import SCRIPTS, mended, processes

FILES = ("--tokenizer-type", "--tokenizer-model", "--data-path", "--vocab-file", "--merge-file", "--vocab-size")
STAGES = {"gpt3_175b": 16, "mixtral_8x7b": 4, "deepseek_v3": 16}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_list_runs_dry_as_the_job_that_it_is_for(name, tmp_path, monkeypatch, capsys):
    """With random data and a tokenizer without files in place of the script's; everything else as it stands."""
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.chdir(tmp_path)
    words = mended(name).split()
    monkeypatch.setenv("WORLD_SIZE", processes(" ".join(words)))
    for flag in FILES:
        if flag in words:
            del words[words.index(flag) : words.index(flag) + 2]
    replaced = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "50256", "--dry-run"]
    code = pretrain_gpt.main([word for word in words if word != "--mock-data"] + replaced)
    output, errors = capsys.readouterr()
    assert (code, errors) == (0, "")
    assert output.count(", loss") == output.count("rank 0    embedding") == (name in STAGES)
    assert f"rank {STAGES[name] - 1} " in output if name in STAGES else "pipeline stages" not in output
    assert "memory of one rank" in output
    assert list(tmp_path.iterdir()) == [tmp_path / "checkpoints"], "nothing is written"
