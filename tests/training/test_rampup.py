"""A run whose global batch grows: every sample once, the log says how many, and a resume continues the ramp."""

from tests.training.runs import flags, metrics, run, write_corpus


def ramped(prefix, directory, *extra):
    length = ("--train-samples", "60", "--rampup-batch-size", "4", "4", "24", "--global-batch-size", "12")
    base = [f for i, f in enumerate(flags(prefix)) if not _counts_iterations(flags(prefix), i)]
    return [*base, *length, "--lr-warmup-samples", "8", "--log-interval", "1", "--log-dir", str(directory), *extra]


def _counts_iterations(argv, i):
    """Whether it is one of the flags that count in iterations, or its value."""
    dropped = ("--train-iters", "--lr-warmup-iters")
    return argv[i] in dropped or (i > 0 and argv[i - 1] in dropped)


def test_the_batch_grows_and_a_resume_continues(tmp_path):
    prefix = write_corpus(tmp_path)
    assert run(*ramped(prefix, tmp_path / "a")) == 0
    lines = metrics(tmp_path / "a")[0]
    assert [line["global_batch_size"] for line in lines] == [4, 4, 4, 8, 8, 12, 12, 12]
    assert [line["consumed_samples"] for line in lines] == [4, 8, 12, 20, 28, 40, 52, 64]
    assert all(line["consumed_tokens"] == 32 * line["consumed_samples"] for line in lines)
    saved = ("--save", str(tmp_path / "checkpoints"))
    assert run(*ramped(prefix, tmp_path / "b", *saved, "--exit-interval", "4")) == 0
    assert run(*ramped(prefix, tmp_path / "b", *saved, "--load", saved[1])) == 0
    again = metrics(tmp_path / "b")[0]
    for name in ("lm_loss", "grad_norm", "global_batch_size", "consumed_samples", "learning_rate"):
        assert [line[name] for line in again] == [line[name] for line in lines], name


def test_the_batch_changes_in_steps(tmp_path):
    """Thresholds are tokens, 32 a sample here."""
    prefix = write_corpus(tmp_path)
    steps = ("--train-samples", "40", "--step-batch-size-schedule", "0:4 256:12", "1K:8")
    base = [f for i, f in enumerate(flags(prefix)) if not _counts_iterations(flags(prefix), i)]
    batch = [i for i, f in enumerate(base) if f == "--global-batch-size" or base[i - 1] == "--global-batch-size"]
    base = [f for i, f in enumerate(base) if i not in batch]
    assert run(*base, *steps, "--lr-warmup-samples", "8", "--log-interval", "1", "--log-dir", str(tmp_path / "a")) == 0
    lines = metrics(tmp_path / "a")[0]
    assert [line["global_batch_size"] for line in lines] == [4, 4, 12, 12, 8]
