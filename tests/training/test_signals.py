"""SIGTERM and SIGUSR1 end a run after the iteration in hand, with a complete checkpoint and an exit code (CASES 78)."""

import os
import signal
import time
from pathlib import Path

import pytest

from megafp8.training.signals import StopSignal
from tests import forked
from tests.training.runs import flags, metrics, run, write_corpus

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("sent_signal", "whole_group"),
    [(signal.SIGTERM, True), (signal.SIGTERM, False), (signal.SIGUSR1, True)],
    ids=["TERM-group", "TERM-process", "USR1-group"],
)
def test_a_signal_saves_with_loader_workers_alive(tmp_path, sent_signal, whole_group):
    prefix = write_corpus(tmp_path)
    argv = flags(prefix, "--num-workers", "2", "--train-iters", "20000", "--log-interval", "1", "--eval-iters", "0")
    argv += ["--log-dir", str(tmp_path / "run"), "--save", str(tmp_path / "c")]
    output = tmp_path / "output"
    output.touch()
    process = forked.start([str(ROOT / "pretrain_gpt.py"), *argv], output, session=True)
    try:
        while "iteration        3/" not in output.read_text():
            assert process.exitcode is None, output.read_text()
            time.sleep(0.02)
        if whole_group:
            os.killpg(process.pid, sent_signal)
        else:
            os.kill(process.pid, sent_signal)
        process.join()
    finally:
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.exitcode == 128 + sent_signal, output.read_text()
    assert f"signal {int(sent_signal)}" in output.read_text()
    last = metrics(tmp_path / "run")[0][-1]["iteration"]
    assert (tmp_path / "c" / "latest").read_text().strip() == f"iter_{last:07d}"
    resumed = flags(prefix, "--train-iters", "20000", "--exit-interval", str(last + 1), "--eval-iters", "0")
    assert run(*resumed, "--log-dir", str(tmp_path / "run"), "--load", str(tmp_path / "c")) == 0


def test_a_second_interrupt_ends_at_once_and_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before
