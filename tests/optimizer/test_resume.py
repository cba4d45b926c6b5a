"""Stop and resume through files = no stop, bit for bit, for every recipe."""

import pytest
import torch
from torch import nn

from megafp8.checkpoint import find_checkpoint, load_found, save_checkpoint
from megafp8.fp8 import get_recipe
from megafp8.fp8.delayed import DelayedScaling
from megafp8.fp8.linear import Linear
from megafp8.optimizer import AdamWOptions, Optimizer, Schedule
from megafp8.params import Init, ParamSpec, initial_value, named_specs
from megafp8.step import Phase, StepContext
from tests.optimizer.helpers import assert_same_bits

RECIPES = [None, "tensorwise", "blockwise", "mxfp8", "delayed"]
SCHEDULE = Schedule(1e-2, 40, warmup_steps=8, decay_style="cosine")
BATCH = 4


class MLP(nn.Module):
    """Two linears and a gain that autograd handles."""

    def __init__(self, recipe, seed):
        super().__init__()
        self.layers = nn.ModuleList()
        for i, (rows, columns) in enumerate([(64, 32), (32, 64)]):
            weight = ParamSpec(f"layers.{i}.weight", (rows, columns), Init("normal", 0.1), True)
            bias = ParamSpec(f"layers.{i}.bias", (rows,), Init("zeros"), False)
            specs = {"weight_spec": weight, "bias_spec": bias, "params_dtype": torch.bfloat16}
            self.layers.append(Linear(columns, rows, recipe=recipe, **specs))
        self.gain = nn.Parameter(torch.empty(32, dtype=torch.bfloat16))
        self.gain.spec = ParamSpec("gain", (32,), Init("ones"), False)
        with torch.no_grad():
            for spec, param in named_specs(self):
                param.copy_(initial_value(spec, seed))

    def forward(self, x, step):
        return self.layers[1](torch.relu(self.layers[0](x * self.gain, step)), step)


class Run:
    """A small training run; `iteration` counts its steps."""

    def __init__(self, recipe, seed=1):
        recipe = get_recipe(recipe) if recipe else None
        self.model = MLP(recipe, seed)
        self.optimizer = Optimizer(named_specs(self.model), AdamWOptions(), seed=seed)
        self.scaling = DelayedScaling.of(self.model)
        self.owners = [o for o in (self.optimizer.weights, self.optimizer, self.scaling) if o is not None]
        self.iteration = 0
        self.norms = []

    def step(self):
        generator = torch.Generator().manual_seed(self.iteration)
        self.optimizer.zero_grad()
        for microbatch in range(2):
            x = torch.randn(BATCH // 2 * 8, 32, generator=generator).bfloat16()
            step = StepContext(
                Phase.TRAIN, self.iteration, microbatch, grads=self.optimizer.grads, scaling=self.scaling
            )
            (self.model(x, step).float() - x.float().roll(1, 1)).square().sum().backward()
        if self.scaling is not None:
            self.scaling.advance()
        lr = SCHEDULE.lr(self.iteration * BATCH)
        self.norms.append(self.optimizer.step(lr=lr, weight_decay=0.1, valid_tokens=BATCH * 8).grad_norm.item())
        self.iteration += 1

    def items(self):
        return {name: item for owner in self.owners for name, item in owner.state().items()}

    def save(self, directory):
        assert save_checkpoint(directory, self.iteration, self.items(), {}) is not None

    def load(self, directory, **flags):
        found = find_checkpoint(directory)
        tensors = load_found(found, self.items(), **flags)
        for owner in self.owners:
            if owner is self.optimizer and not any(name.startswith("optimizer/") for name in tensors):
                owner.reset_from_weights()
            else:
                owner.load_state(tensors)
        self.iteration = found.iteration

    def bits(self):
        return {name: item.tensor.clone() for name, item in self.items().items()}


@pytest.mark.parametrize("recipe", RECIPES)
def test_stop_and_resume_equals_no_stop(tmp_path, recipe):
    """CASES 15, 16, 60, 76. Also twice in a row, and a save changes nothing."""
    whole = Run(recipe)
    for _ in range(6):
        whole.step()
    first = Run(recipe)
    for _ in range(3):
        first.step()
    first.save(tmp_path)
    first.step()
    assert first.norms == whole.norms[:4]
    second = Run(recipe, seed=2)
    second.load(tmp_path)
    second.step()
    second.save(tmp_path)
    third = Run(recipe, seed=3)
    third.load(tmp_path)
    assert_same_bits(third.bits(), second.bits())
    for _ in range(2):
        third.step()
    assert second.norms + third.norms == whole.norms[3:]
    assert_same_bits(third.bits(), whole.bits())


@pytest.mark.parametrize(("saving", "loading"), [("delayed", None), (None, "delayed"), ("blockwise", "tensorwise")])
def test_runs_of_other_precision_load_each_other(tmp_path, saving, loading):
    """CASES 60: no missing key in either direction; masters, moments and weights are equal."""
    source = Run(saving)
    for _ in range(2):
        source.step()
    source.save(tmp_path)
    target = Run(loading, seed=2)
    target.load(tmp_path)
    a, b = source.bits(), target.bits()
    shared = a.keys() & b.keys()
    assert {name.split("/")[0] for name in shared} == {"model", "optimizer"}
    assert_same_bits({n: a[n] for n in shared}, {n: b[n] for n in shared})
    target.step()
    assert not target.optimizer.skipped_count


def test_stateless_recipes_store_nothing(tmp_path):
    """CASES 60."""
    names = {recipe: set(Run(recipe).items()) for recipe in RECIPES}
    assert names[None] == names["tensorwise"] == names["blockwise"] == names["mxfp8"]
    assert names[None] < names["delayed"]


@pytest.mark.parametrize("flags", [{"finetune": True}, {"no_load_optim": True}])
def test_weights_alone_survive_a_step_of_lr_0(tmp_path, flags):
    """CASES 33, through files."""
    source = Run("blockwise")
    for _ in range(3):
        source.step()
    source.save(tmp_path)
    target = Run("blockwise", seed=2)
    target.step()
    target.load(tmp_path, **flags)
    target.iteration = 0  # the schedule's first rate is 0
    target.step()
    weights = {name: t for name, t in source.bits().items() if name.startswith("model/")}
    assert_same_bits({n: t for n, t in target.bits().items() if n in weights}, weights)
    assert target.optimizer.step_count == 1
