"""Masters and moments below FP32, in the optimizer: exact where they should be, close elsewhere, and resumable."""

import pytest
import torch

from megafp8.config import build_config
from megafp8.optimizer import AdamWOptions, Group, Optimizer
from megafp8.optimizer.adamw import Rates, step_scalars
from megafp8.optimizer.groups import check_patterns, groups_of, precision_of
from megafp8.optimizer.layout import Entry, Shard, plan_layouts
from megafp8.optimizer.precision import FP32_STATE, Precision
from megafp8.optimizer.stored import Stored
from megafp8.optimizer.update import BufferUpdate
from megafp8.params import Init, ParamSpec
from tests.optimizer.helpers import SHAPES, assert_same_bits, make_params, set_grads, snapshot

REMAINDER, BF16, FP8 = Precision("remainder"), Precision("fp32", "bf16", "bf16"), Precision("fp32", "fp8", "fp8")
ALL = Precision("remainder", "fp8", "fp8")
LOWER = {"remainder": REMAINDER, "bf16": BF16, "fp8": FP8, "all": ALL}


def make(precision=FP32_STATE, seed=1, **options):
    params = make_params(seed=seed)
    precisions = {spec.name: precision for spec, _ in params if spec.decay}
    return Optimizer(params, AdamWOptions(**options), seed=1, precisions=precisions)


def steps(optimizer, generator, count=5):
    for _ in range(count):
        optimizer.zero_grad()
        for _, view in sorted(optimizer.grads.state.views.items()):  # buffers' order depends on the precision
            view.copy_(torch.randn(view.shape, generator=generator))
        optimizer.step(lr=1e-2, weight_decay=0.1, valid_tokens=3)
    return optimizer


def test_remainders_are_exact_masters():
    exact, split = (steps(make(p), torch.Generator().manual_seed(0)) for p in (FP32_STATE, REMAINDER))
    for name, master in exact.masters.views.items():
        assert torch.equal(split.masters.views[name], master), name
        difference = split.weights.params[name].float() - exact.weights.params[name].float()
        assert (difference.abs() <= master.abs() * 2**-7).all(), name  # ties are rounded another way
    assert split.masters.nbytes < 0.6 * exact.masters.nbytes


@pytest.mark.parametrize("name", LOWER)
def test_state_goes_through_a_checkpoint_bit_for_bit(name):
    """What is saved is FP32; stored again it is what it was, and the steps that follow are the same."""
    generator = torch.Generator().manual_seed(0)
    optimizer = steps(make(LOWER[name]), generator)
    saved = snapshot(optimizer)
    assert all(t.dtype == torch.float32 for key, t in saved.items() if "exp_avg" in key or "master" in key)
    restored = make(LOWER[name], seed=2)
    restored.weights.load_state(saved)
    restored.load_state(saved)
    assert_same_bits(snapshot(restored), saved)
    twin = torch.Generator()
    twin.set_state(generator.get_state())
    assert_same_bits(snapshot(steps(restored, twin)), snapshot(steps(optimizer, generator)))


@pytest.mark.parametrize("name", LOWER)
def test_a_skipped_step_leaves_every_bit(name):
    """CASES 31."""
    optimizer = steps(make(LOWER[name]), torch.Generator().manual_seed(0))
    before = snapshot(optimizer)
    set_grads(optimizer, torch.Generator().manual_seed(1), scale=float("nan"))
    assert optimizer.step(lr=1e-2, weight_decay=0.1, valid_tokens=3).skipped
    after = snapshot(optimizer)
    del before["optimizer/skipped_steps"], after["optimizer/skipped_steps"]
    assert_same_bits(before, after)


@pytest.mark.parametrize("name", LOWER)
def test_any_precision_loads_any_others_checkpoint(name):
    exact = steps(make(), torch.Generator().manual_seed(0))
    other = make(LOWER[name], seed=2)
    other.load_state(snapshot(exact))
    for key, master in exact.masters.views.items():
        assert torch.equal(other.masters.views[key], master)
    error = {"remainder": 0, "bf16": 2**-8, "fp8": 0.05, "all": 0.05}[name]
    for key, moment in exact.exp_avg.views.items():
        assert ((other.exp_avg.views[key] - moment).norm() <= error * moment.norm()).all(), key


@pytest.mark.parametrize(("name", "error"), [("remainder", 1e-6), ("bf16", 1e-2), ("fp8", 5e-2), ("all", 5e-2)])
def test_100_steps_against_float64(name, error):
    """The move from the initial values, so that a moment that stands still would show."""
    optimizer = make(LOWER[name], beta2=0.999)
    start = {n: m.double() for n, m in optimizer.masters.views.items()}
    reference = {n: torch.nn.Parameter(m.clone()) for n, m in start.items()}
    adamw = torch.optim.AdamW(reference.values(), lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    drift = {n: torch.randn(p.shape, generator=generator) for n, p in reference.items()}
    for _ in range(100):
        for n, grad in set_grads(optimizer, generator, scale=0.5).items():
            optimizer.grads.state.views[n].add_(drift[n])
            reference[n].grad = (grad + drift[n]).double()
        torch.nn.utils.clip_grad_norm_(list(reference.values()), 1.0)
        adamw.step()
        optimizer.step(lr=1e-3, weight_decay=0.0, valid_tokens=1)
    for n, master in optimizer.masters.views.items():
        moved, expected = master.double() - start[n], reference[n].detach() - start[n]
        assert (moved - expected).norm() <= error * expected.norm() + 1e-6 * start[n].norm(), n


@pytest.mark.parametrize("name", LOWER)
def test_any_number_of_shards_gives_the_same_bits(name):
    """Random bits and blocks are the parameters', not the ranks'."""
    entries = [Entry("a", 64 * 9 + 5, torch.bfloat16, False, Group(True), precision=LOWER[name]),
               Entry("b", 300, torch.bfloat16, False, Group(True), precision=LOWER[name])]  # fmt: skip
    values, grads = {}, {}
    generator = torch.Generator().manual_seed(0)
    for entry in entries:
        values[entry.name], grads[entry.name] = (torch.randn(entry.numel, generator=generator) for _ in range(2))
    wholes = []
    for ranks in (1, 2, 3):
        (layout,) = plan_layouts(entries, shards=ranks)
        found = {entry.name: [] for entry in entries}
        for rank in range(ranks):
            for piece, parts in _updated(Shard(layout, rank), values, grads, LOWER[name]):
                found[piece.name].append(parts)
        wholes.append({n: [torch.cat(column) for column in zip(*rows, strict=True)] for n, rows in found.items()})
    for other in wholes[1:]:
        for n, columns in wholes[0].items():
            assert all(torch.equal(a, b) for a, b in zip(columns, other[n], strict=True)), n


def _updated(shard, values, grads, precision):
    """(piece, [master, exp_avg, exp_avg_sq]) after three updates of one rank's shard."""

    class Weights:
        flat = torch.zeros(shard.layout.numel, dtype=torch.bfloat16)

        def write(self, masters):
            pass

        announce = write

    weights, cpu = Weights(), torch.device("cpu")
    weights.announce = lambda: None
    master = torch.zeros(shard.numel, dtype=torch.int16 if precision.master == "remainder" else torch.float32)
    m = Stored.zeros(precision.exp_avg, shard.numel, cpu, root=False)
    v = Stored.zeros(precision.exp_avg_sq, shard.numel, cpu, root=True)
    update = BufferUpdate(shard, {"a": 0, "b": 0}, {"a": 1, "b": 2}, master, m, v, weights)
    grad, starts = torch.zeros(shard.layout.numel), {slot.name: slot.start for slot in shard.layout.slots}
    for slot in shard.layout.slots:
        grad[slot.start : slot.stop] = grads[slot.name]
    for piece in shard.pieces:
        there = slice(starts[piece.name] + piece.start, starts[piece.name] + piece.stop)
        update._write_master(values[piece.name][piece.start : piece.stop], piece.place, there)
    for step in range(1, 4):
        one, skip = torch.ones((), dtype=torch.float64), torch.tensor(False)
        scalars = step_scalars(torch.tensor(step), one, skip, [Rates(1e-2, 0.1)], beta1=0.9, beta2=0.95)
        update(grad, scalars, beta1=0.9, beta2=0.95, eps=1e-8)
    for piece in shard.pieces:
        there = slice(starts[piece.name] + piece.start, starts[piece.name] + piece.stop)
        yield piece, [update._read_master(piece.place, there), m.read()[piece.place], v.read()[piece.place]]


def config(**values):
    base = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 8, "micro_batch_size": 1}
    base |= {"lr": 1e-3, "train_iters": 1, "mock_data": True, "tokenizer_type": "ByteTokenizer", "bf16": True}
    return build_config(env={}, **base | values)


def test_flags_choose_the_precision_of_matrices():
    chosen = config(use_precision_aware_optimizer=True, exp_avg_dtype="bf16", exp_avg_sq_dtype="fp8",
                    store_param_remainders=True, keep_optimizer_state_in_fp32=("embedding.*",))  # fmt: skip
    assert precision_of("layers.0.fc1.weight", (2, 2), chosen) == Precision("remainder", "bf16", "fp8")
    assert precision_of("embedding.weight", (2, 2), chosen) == FP32_STATE
    assert precision_of("layers.0.norm.weight", (2,), chosen) == FP32_STATE
    assert precision_of("layers.0.fc1.weight", (2, 2), config(use_precision_aware_optimizer=True)) == FP32_STATE


def test_flags_multiply_rates_by_name():
    """CASES 64, 65: groups by name, the last match counts; the same list on every rank."""
    specs = {name: ParamSpec(name, shape, Init("zeros"), len(shape) > 1) for name, shape in SHAPES.items()}
    multiplied = config(lr_multipliers=("layers.*=0.5", "layers.1.*=2"), weight_decay_multipliers=("embedding.*=0",))
    groups = groups_of(specs, multiplied, decoupled=["embedding.weight"])
    assert groups["embedding.weight"] == Group(True, True, 1.0, 0.0)
    assert groups["layers.0.fc1.weight"] == Group(True, False, 0.5)
    assert groups["layers.0.norm.weight"] == Group(False, False, 0.5)
    assert groups["layers.1.fc2.weight"] == Group(True, False, 2.0)
    assert list(groups) == list(specs)
    check_patterns(specs, multiplied)
    with pytest.raises(ValueError, match=r"--lr-multipliers layer.\*: no trained parameter"):
        check_patterns(specs, config(lr_multipliers=("layer.*=2",)))


def test_multiplied_rates_move_parameters_so():
    params = make_params(dtype=torch.float32)
    groups = {"layers.0.norm.weight": Group(False, lr_mult=0.0), "layers.1.fc2.weight": Group(True, lr_mult=3.0)}
    optimizer = Optimizer(params, AdamWOptions(clip_grad=0), seed=1, groups=groups)
    before = {n: m.clone() for n, m in optimizer.masters.views.items()}
    optimizer.zero_grad()
    for view in optimizer.grads.state.views.values():
        view.fill_(1.0)
    optimizer.step(lr=1e-3, weight_decay=0.0, valid_tokens=1)
    for name, rate in {"layers.0.norm.weight": 0.0, "layers.1.fc2.weight": 3e-3, "embedding.weight": 1e-3}.items():
        moved = before[name] - optimizer.masters.views[name]
        torch.testing.assert_close(moved, torch.full_like(moved, rate), rtol=1e-4, atol=0)
