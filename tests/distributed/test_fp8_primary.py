"""--fp8-param-gather: the bits of high-precision weights, with FP8 bytes only; any number of ranks; checkpoints."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import product
from unittest import mock

import pytest
import torch
from torch import Tensor

from megafp8.checkpoint import find_checkpoint, load_found, save_checkpoint
from megafp8.core.gpt import build_model
from megafp8.fp8 import DelayedScaling, Linear, get_recipe
from megafp8.optimizer import AdamWOptions, Optimizer, Sharding, build_optimizer
from megafp8.parallel import build_parallel
from megafp8.params import Init, ParamSpec, initial_value, name_of, specs_in_order, unpadded
from megafp8.training.step import advance_scaling, evaluate, forward_backward
from tests.distributed.layouts import GPT2, LLAMA, Layout, make_config, micro_batches
from tests.distributed.recorder import record
from tests.distributed.test_zero import Parts, context, parts_of, whole

RECIPES = {
    "tensorwise": {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
    "blockwise": {"fp8_format": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8_format": "e4m3", "fp8_recipe": "mxfp8"},
    "mxfp8 1d": {"fp8_format": "e4m3", "fp8_recipe": "mxfp8", "fp8_weight_tile": "1d"},
    "delayed": {"fp8_format": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 4},
}
ZERO = {"use_distributed_optimizer": True}
PRIMARY = ZERO | {"fp8_param_gather": True}
OVERLAP = PRIMARY | {"overlap_grad_reduce": True, "overlap_param_gather": True}
MODEL = LLAMA | {
    "bf16": True,
    "num_layers": 1,
    "micro_batch_size": 1,
    "global_batch_size": 2,
    "lr": 1e-3,
    "min_lr": 1e-3,
}


class Run:
    """A training run; `freeze`: part of the names of parameters that aren't trained."""

    def __init__(self, values: dict, layout: Layout, freeze: str | None = None, seed: int = 7):
        self.config = make_config(values | {"seed": seed}, layout)
        self.parallel = build_parallel(self.config, "cpu")
        self.model = build_model(self.config, self.parallel, "cpu")
        for spec, param in specs_in_order(self.model):
            param.requires_grad_(freeze is None or freeze not in spec.name)
        self.scaling = DelayedScaling.of(self.model)
        pairs = specs_in_order(self.model)
        self.optimizer = build_optimizer(pairs, self.config, self.parallel, scaling=self.scaling)
        if self.config.parallel.overlap_param_gather:
            self.optimizer.wait_before_use(self.model)
        self.owners = [o for o in (self.optimizer.weights, self.optimizer, self.scaling) if o is not None]
        self.losses: list[float] = []
        self.iteration = 0

    def step(self) -> None:
        self.iteration += 1
        optimizer, device = self.optimizer, torch.device("cpu")
        batches = list(micro_batches(self.config, self.parallel, self.iteration))
        optimizer.zero_grad(len(batches))
        options = {"iteration": self.iteration, "seed": 7, "scaling": self.scaling, "device": device}
        output = forward_backward(self.model, optimizer, batches, **options)
        if self.scaling is not None:
            advance_scaling(self.scaling, self.parallel)
        stats = optimizer.step(lr=1e-3, weight_decay=0.1, valid_tokens=output.valid_tokens, loss=output.loss)
        self.losses += [output.loss.item(), stats.grad_norm.item()]

    def evaluate(self) -> None:
        batches = list(micro_batches(self.config, self.parallel, 1000))
        options = {
            "count": len(batches),
            "scaling": self.scaling,
            "device": torch.device("cpu"),
            "parallel": self.parallel,
        }
        self.losses.append(evaluate(self.model, iter(batches), **options))

    def items(self):
        return {name: item for owner in self.owners for name, item in owner.state().items()}

    def save(self, directory: str) -> None:
        assert save_checkpoint(directory, self.iteration, self.items(), {}, parallel=self.parallel)

    def load(self, directory: str, **flags) -> None:
        found = find_checkpoint(directory)
        tensors = load_found(found, self.items(), **flags)
        for owner in self.owners:
            if owner is self.optimizer and not any(name.startswith("optimizer/") for name in tensors):
                owner.reset_from_weights()
            elif owner is not self.scaling or not flags:
                owner.load_state(tensors)
        self.optimizer.write_weights()
        self.iteration = found.iteration


def train(values: dict, layout: Layout, steps: int, directory: str, freeze: str | None = None) -> tuple:
    """Losses and norms, with an evaluation or a save between steps; state and weights at the end."""
    run = Run(values, layout, freeze)
    for number in range(steps):
        run.step()
        if number % 5 == 2:
            run.evaluate()
        if number % 7 == 3:
            run.save(directory)
    return run.losses, parts_of(run.optimizer.state()), parts_of(run.optimizer.weights.state())


def same_parts(a: list[Parts], b: list[Parts]) -> None:
    ours, theirs = whole(a), whole(b)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name], tensor), name


def compare(pool, values: dict, layout: Layout, steps: int, tmp_path, extra: dict = PRIMARY, **options) -> list[float]:
    on, off = (
        pool.run_on(layout.world, train, values | more, layout, steps, str(tmp_path / name), **options)
        for name, more in (("on", extra), ("off", ZERO))
    )
    for a, b in zip(on, off, strict=True):
        assert a[0] == b[0]
    for part in (1, 2):
        same_parts([rank[part] for rank in on], [rank[part] for rank in off])
    return off[0][0]


@pytest.mark.parametrize(("name", "dp"), [*product(RECIPES, (1,)), ("blockwise", 2), ("delayed", 2)])
def test_on_equals_off(pool, tmp_path, name, dp):
    """Losses, norms, masters, moments and the weights that are saved; evaluations and saves in between (CASES 04)."""
    compare(pool, MODEL | RECIPES[name], Layout(dp=dp), 5, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dp"), list(product(RECIPES, (1, 2))))
def test_on_equals_off_over_50_steps(pool, tmp_path, name, dp):
    losses = compare(pool, MODEL | RECIPES[name], Layout(dp=dp), 50, tmp_path, OVERLAP)
    assert losses[-2] < losses[0]


@pytest.mark.parametrize("layout", [Layout(tp=2, sp=True), Layout(pp=2, dp=2)], ids=str)
def test_on_equals_off_in_other_layouts(pool, tmp_path, layout):
    """Tensorwise scales are those of all parts; stages; a tied embedding, which stays in BF16."""
    values = GPT2 | {"bf16": True, "micro_batch_size": 1, "global_batch_size": 4} | RECIPES["tensorwise"]
    compare(pool, values, layout, 3, tmp_path, OVERLAP)


def test_frozen_weights_stay_as_they_are(pool, tmp_path):
    def freeze(extra):
        args = (MODEL | RECIPES["blockwise"] | extra, Layout(dp=2), 3, str(tmp_path / str(len(extra))), "fc1")
        return pool.run_on(2, train, *args)

    on, off = freeze(PRIMARY), freeze(ZERO)
    assert [rank[0] for rank in on] == [rank[0] for rank in off]
    same_parts([rank[2] for rank in on], [rank[2] for rank in off])


def test_a_cut_through_tiles_is_refused(pool):
    (error, _) = pool.run_on(2, refused)
    assert "--fp8-param-gather" in error
    assert "\n" not in error


def refused() -> str:
    try:
        Run(MODEL | RECIPES["blockwise"] | PRIMARY, Layout(tp=2))
    except ValueError as error:
        return str(error)
    return "not refused"


SHAPES = {"first": (77,), "a": (130, 200), "b": (256, 384), "c": (33, 40)}


class Odd(torch.nn.Module):
    """Matrices at odd offsets."""

    def __init__(self, recipe) -> None:
        super().__init__()
        first = ParamSpec("first", SHAPES["first"], Init("zeros"), False)
        self.first = torch.nn.Parameter(torch.zeros(77, dtype=torch.bfloat16))
        self.first.spec = first
        self.linears = torch.nn.ModuleList()
        for name in "abc":
            rows, columns = SHAPES[name]
            spec = ParamSpec(name, (rows, columns), Init("normal", 0.02), True)
            options = {"weight_spec": spec, "params_dtype": torch.bfloat16}
            self.linears.append(Linear(columns, rows, False, recipe=recipe, **options))
        with torch.no_grad():
            for spec, param in specs_in_order(self):
                param.copy_(initial_value(spec, 1))


def odd_steps(world: int, recipe: dict, primary: bool) -> tuple[Parts, dict[str, list[Tensor]]]:
    """Some steps from gradients that add up exactly; the largest weight is made to lie in the last rank's part."""
    parallel = context(world)
    model = Odd(get_recipe(**recipe))
    sharding = Sharding(distributed=True, fp8_primary=primary, bucket_elements=40000, overlap_reduce=True)
    optimizer = Optimizer(specs_in_order(model), AdamWOptions(), seed=1, parallel=parallel, sharding=sharding)
    for iteration in range(5):
        optimizer.zero_grad()
        for number, (_, view) in enumerate(sorted(optimizer.grads.state.views.items())):
            generator = torch.Generator().manual_seed(100 * iteration + number)
            shares = torch.randint(-100, 100, (12, *view.shape), generator=generator, dtype=torch.int16)
            shares.view(12, -1)[0, -1] -= 5000
            view.add_(shares[parallel.rank :: world].float().sum(0))
        optimizer.reduce_gradients()
        optimizer.step(lr=1e-2, weight_decay=0.1, valid_tokens=100)
    operands = {}
    for linear in model.linears:
        for gemm in ("fprop", "dgrad"):
            storage = linear.weight.owner.operand(gemm)
            raw = storage.scale_inv.contiguous().view(torch.uint8)
            operands[f"{linear.weight.spec.name} {gemm}"] = [storage.data.view(torch.uint8).clone(), raw.clone()]
    return parts_of(optimizer.state()), operands


ODD_RECIPES = [
    {"name": "tensorwise"},
    {"name": "blockwise"},
    pytest.param({"name": "blockwise", "power_of_two_scales": False}, marks=pytest.mark.slow),
    {"name": "mxfp8"},
    {"name": "mxfp8", "weight_tile": "1d"},
]


@pytest.mark.parametrize("recipe", ODD_RECIPES, ids=str)
def test_any_number_of_ranks_gives_the_same_bytes_and_scales(pool, recipe):
    """CASES 06, 04: shards cut tiles and tensors; both orientations are those of one rank's BF16 weight."""
    ((state, expected),) = pool.run_on(1, odd_steps, 1, recipe, False)
    for world in (1, 2, 3, 4):
        ranks = pool.run_on(world, odd_steps, world, recipe, True)
        same_parts([rank[0] for rank in ranks], [state])
        for _, operands in ranks:
            for name, tensors in expected.items():
                for a, b in zip(operands[name], tensors, strict=True):
                    assert torch.equal(a, b), name


def what_is_held(values: dict) -> tuple[dict, int, int, list, bool]:
    run = Run(MODEL | values, Layout(dp=2))
    owned = {s.name: p for s, p in specs_in_order(run.model) if getattr(getattr(p, "owner", None), "primary", None)}
    resident = sum(param.untyped_storage().nbytes() for param in owned.values())
    stored = sum(p.owner.primary.data["rowwise"].nbytes for p in owned.values())
    exact = {}
    for key, item in run.optimizer.masters.state("", run.optimizer.weights.specs).items():
        spec = run.optimizer.weights.specs[name_of(key)]
        value = unpadded(initial_value(spec, 7), spec)[tuple(slice(a, b) for a, b in item.box)]
        exact[key] = torch.equal(item.tensor, value)
    with record() as log:
        run.step()
    return exact, resident, stored, [(m.kind, m.dtype, m.size) for m in log.messages], len(owned)


def test_masters_are_seeded_from_the_initial_value_and_nothing_else_is_held(pool):
    """CASES 32. A step sends one packed maximum, and bytes instead of BF16."""
    for exact, resident, stored, sent, owned in pool.run_on(2, what_is_held, RECIPES["blockwise"] | PRIMARY):
        assert all(exact.values())
        assert owned == 4
        assert resident == 2 * owned
        assert stored >= LLAMA["hidden_size"] ** 2
        gathered = [(dtype, size) for kind, dtype, size in sent if kind == "gather"]
        assert sum(size for dtype, size in gathered if dtype == torch.uint8) == stored // 2
        maxima = [size for kind, dtype, size in sent if kind == "max" and dtype == torch.float32]
        assert len(maxima) == 1


def saved(values: dict, layout: Layout, directory: str) -> None:
    run = Run(MODEL | values, layout)
    for _ in range(3):
        run.step()
    run.save(directory)


def resumed(values: dict, layout: Layout, directory: str, flags: dict, lr: float) -> tuple[Parts, Parts, list[float]]:
    run = Run(MODEL | values, layout, seed=8)
    run.load(directory, **flags)
    loaded = parts_of(run.optimizer.weights.state())
    with ExitStack() as stack:
        if lr == 0:
            step = Optimizer.step
            zero = lambda self, **options: step(self, **options | {"lr": 0.0})  # noqa: E731
            stack.enter_context(mock.patch.object(Optimizer, "step", zero))
        run.step()
    return loaded, parts_of(run.optimizer.weights.state()), run.losses


@pytest.mark.parametrize("name", ["blockwise", "delayed"])
def test_checkpoints_of_either_kind_load_each_other(pool, tmp_path, name):
    """CASES 33, 60: FP8 primary weights are saved in BF16, as the masters round; what goes on has the same bits."""
    kinds = {"primary": RECIPES[name] | PRIMARY, "plain": RECIPES[name]}
    results = []
    for source, target in product(kinds, kinds):
        directory = str(tmp_path / source)
        if not (tmp_path / source).exists():
            pool.run_on(2, saved, kinds[source], Layout(dp=2), directory)
        results.append(pool.run_on(2, resumed, kinds[target], Layout(dp=2), directory, {}, 1e-3))
    for ranks in results[1:]:
        for part in (0, 1):
            same_parts([rank[part] for rank in ranks], [rank[part] for rank in results[0]])
        assert [rank[2] for rank in ranks] == [rank[2] for rank in results[0]]


@pytest.mark.parametrize("flags", [{"finetune": True}, {"no_load_optim": True}], ids=str)
def test_weights_alone_survive_a_step_of_lr_0(pool, tmp_path, flags):
    """CASES 33."""
    values = RECIPES["blockwise"] | PRIMARY
    pool.run_on(2, saved, values, Layout(dp=2), str(tmp_path))
    ranks = pool.run_on(2, resumed, values, Layout(dp=2), str(tmp_path), flags, 0.0)
    same_parts([rank[1] for rank in ranks], [rank[0] for rank in ranks])
