"""Learning rate and weight decay as functions of the consumed samples."""

import json
import math

import pytest

from megafp8.config import Config
from megafp8.optimizer import Schedule, build_schedule, resume_schedule, schedule_to_json
from megafp8.optimizer.schedule import DECAYS

BATCH = 8


def config(**values):
    return Config().replace(**{"train_iters": 20, "global_batch_size": BATCH, "lr": 6e-4, "min_lr": 6e-5, **values})


def rates(schedule, steps=20):
    return [schedule.lr(i * BATCH) for i in range(steps + 1)]


def test_warm_up_is_linear_from_init_to_peak():
    lr = rates(build_schedule(config(lr_warmup_iters=4, lr_warmup_init=1e-5)))
    assert lr[:5] == pytest.approx([1e-5 + (6e-4 - 1e-5) * i / 4 for i in range(5)])
    assert max(lr) == lr[4] == 6e-4


@pytest.mark.parametrize(
    ("style", "middle"),
    [("linear", 0.5), ("cosine", 0.5), ("constant", None), ("inverse-square-root", None)],
)
def test_decay_styles(style, middle):
    lr = rates(build_schedule(config(lr_decay_style=style, lr_warmup_iters=4)), 30)
    if style == "constant":
        assert lr[4:] == [6e-4] * 27
        return
    if style == "inverse-square-root":
        assert lr[16] == pytest.approx(6e-4 * 0.5)  # four times the warm-up
    else:
        assert lr[12] == pytest.approx(6e-5 + middle * (6e-4 - 6e-5))
        assert lr[20] == pytest.approx(6e-5)
    assert lr[21:] == [6e-5] * 10


def test_cosine_in_the_first_quarter():
    lr = rates(build_schedule(config(lr_decay_style="cosine")))
    assert lr[5] == pytest.approx(6e-5 + 0.5 * (1 + math.sqrt(0.5)) * (6e-4 - 6e-5))


@pytest.mark.parametrize(
    ("style", "half"),
    [("linear", 0.5), ("cosine", 0.5), ("exponential", math.sqrt(2) - 1), ("minus_sqrt", 1 - math.sqrt(0.5))],
)
def test_wsd_is_flat_and_then_decays(style, half):
    lr = rates(
        build_schedule(config(lr_decay_style="WSD", lr_wsd_decay_style=style, lr_wsd_decay_iters=10, lr_warmup_iters=2))
    )
    assert lr[2:11] == pytest.approx([6e-4] * 9)
    assert lr[15] == pytest.approx(6e-5 + half * (6e-4 - 6e-5))
    assert lr[20] == pytest.approx(6e-5)


def test_decays_go_from_one_to_zero():
    for decay in DECAYS.values():
        assert decay(0.0) == pytest.approx(1)
        assert decay(1.0) == pytest.approx(0, abs=1e-15)
        values = [decay(i / 50) for i in range(51)]
        assert values == sorted(values, reverse=True)


def test_samples_and_iterations_give_the_same_schedule():
    iterations = config(lr_decay_iters=16, lr_warmup_iters=3, lr_decay_style="WSD", lr_wsd_decay_iters=5)
    samples = config(
        train_iters=None,
        train_samples=20 * BATCH,
        lr_decay_samples=16 * BATCH,
        lr_warmup_samples=3 * BATCH,
        lr_decay_style="WSD",
        lr_wsd_decay_samples=5 * BATCH,
    )
    assert rates(build_schedule(iterations)) == rates(build_schedule(samples))


def test_warm_up_fraction_is_of_the_decay():
    assert build_schedule(config(lr_warmup_fraction=0.25, lr_decay_iters=16)).warmup_steps == 4 * BATCH


def test_decoupled_rates_have_their_own_bounds():
    schedule = build_schedule(config(decoupled_lr=1e-3, decoupled_min_lr=1e-4, lr_warmup_iters=4))
    assert schedule.decoupled_lr(2 * BATCH) == pytest.approx(5e-4)
    assert schedule.decoupled_lr(4 * BATCH) == 1e-3
    assert schedule.decoupled_lr(20 * BATCH) == pytest.approx(1e-4)
    plain = build_schedule(config(lr_warmup_iters=4))
    assert [plain.decoupled_lr(i) for i in range(200)] == [plain.lr(i) for i in range(200)]


@pytest.mark.parametrize(("style", "quarter"), [("linear", 0.25), ("cosine", 0.5 * (1 - math.sqrt(0.5)))])
def test_weight_decay_grows(style, quarter):
    schedule = Schedule(1e-3, 100, start_wd=0.1, end_wd=0.5, wd_incr_steps=40, wd_incr_style=style)
    assert schedule.weight_decay(0) == pytest.approx(0.1)
    assert schedule.weight_decay(10) == pytest.approx(0.1 + 0.4 * quarter)
    assert schedule.weight_decay(40) == schedule.weight_decay(1000) == pytest.approx(0.5)


def test_weight_decay_flags():
    assert build_schedule(config(weight_decay=0.3)).weight_decay(5) == 0.3
    grows = build_schedule(
        config(start_weight_decay=0.1, end_weight_decay=0.2, weight_decay_incr_style="linear", train_iters=10)
    )
    assert [grows.weight_decay(i * BATCH) for i in (0, 5, 10, 11)] == pytest.approx([0.1, 0.15, 0.2, 0.2])


def test_a_resume_continues_the_uninterrupted_list():
    """CASES 16: save at step 7 of 20; the schedule comes back from JSON and depends on the samples alone."""
    schedule = build_schedule(config(lr_decay_style="cosine", lr_warmup_iters=3))
    whole = rates(schedule)
    saved = json.loads(json.dumps(schedule_to_json(schedule)))
    resumed = resume_schedule(schedule, saved, override=False, use_checkpoint=False)
    again = resume_schedule(resumed, saved, override=False, use_checkpoint=True)
    assert [again.lr(i * BATCH) for i in range(7, 21)] == whole[7:]


def test_resume_with_another_schedule():
    """CASES 65: constant 6e-4 saved, cosine 6e-4 -> 6e-5 given, with bounds of its own for the embedding."""
    old = build_schedule(config(lr_decay_style="constant", decoupled_lr=1e-3))
    new = build_schedule(config(lr_decay_style="cosine", decoupled_lr=2e-3, decoupled_min_lr=2e-4))
    saved = schedule_to_json(old)
    assert resume_schedule(new, saved, override=True, use_checkpoint=False) == new
    kept = resume_schedule(new, saved, override=False, use_checkpoint=True)
    assert kept == old
    assert kept.decoupled_lr(100) == 1e-3
    with pytest.raises(ValueError, match="--lr-decay-style.*--override-opt_param-scheduler"):
        resume_schedule(new, saved, override=False, use_checkpoint=False)


def test_lengths_of_another_schedule_are_told_as_samples():
    saved = schedule_to_json(build_schedule(config(lr_decay_iters=40)))
    with pytest.raises(ValueError, match=r"--lr-decay-iters.*: \d+ samples saved, \d+ samples now\)"):
        resume_schedule(build_schedule(config(lr_decay_iters=50)), saved, override=False, use_checkpoint=False)


def test_resume_may_change_what_has_no_effect():
    """A longer training with a constant rate and a constant weight decay is no other schedule."""
    saved = schedule_to_json(build_schedule(config(lr_decay_style="constant")))
    longer = build_schedule(config(lr_decay_style="constant", train_iters=40))
    assert resume_schedule(longer, saved, override=False, use_checkpoint=False) == longer
    decayed = schedule_to_json(build_schedule(config()))
    with pytest.raises(ValueError, match="--lr-decay-iters"):
        resume_schedule(build_schedule(config(train_iters=40)), decayed, override=False, use_checkpoint=False)


@pytest.mark.parametrize(
    ("values", "flags"),
    [
        ({"lr_warmup_iters": 20}, "--lr-warmup"),
        ({"min_lr": 1e-3}, "--min-lr"),
        ({"lr_decay_style": "WSD"}, "--lr-wsd-decay-iters"),
        ({"end_weight_decay": 0.1}, "--weight-decay-incr-style"),
    ],
)
def test_contradicting_flags_are_named(values, flags):
    with pytest.raises(ValueError, match=flags):
        build_schedule(config(**values))
