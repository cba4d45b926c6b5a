"""A gradient is accumulated, reduced and consumed where it lies: nothing copies or casts it on the way."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megafp8.fp8 import get_recipe
from megafp8.fp8.param import Weight
from megafp8.optimizer import AdamWOptions, Optimizer, Sharding
from tests.optimizer.helpers import make_optimizer, make_param, set_grads

COPIES = {"clone", "copy_", "_to_copy", "cat", "stack", "_copy_from", "contiguous", "index", "index_select"}
MEASURES = {torch.float64}  # of the norm: read to be squared and added up, not kept


class Watch(TorchDispatchMode):
    """Names of the operations that copy or cast from, or write to, given storages."""

    def __init__(self, flats):
        super().__init__()
        self.storages = {flat.untyped_storage().data_ptr() for flat in flats}
        self.copies, self.writes = [], []

    def _here(self, value):
        return isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in self.storages

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, out = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        flat = [a for arg in args for a in (arg if isinstance(arg, (list, tuple)) else [arg])]
        if name in COPIES and any(map(self._here, flat)) and getattr(out, "dtype", None) not in MEASURES:
            self.copies.append(name)
        if name.endswith("_") and args and self._here(args[0]):
            self.writes.append(name)
        return out


def watched_step(optimizer, param):
    optimizer.zero_grad(2)
    with Watch(optimizer.grads.state.flats) as watch:
        for _ in range(2):
            out, adds = optimizer.grads.target(param)
            out.addmm_(torch.ones(48, 8), torch.ones(8, 16), beta=int(adds))  # a weight gradient
            optimizer.grads.ready(param)
        optimizer.reduce_gradients()
        optimizer.step(lr=1e-3, weight_decay=0.1, valid_tokens=4)
    return watch


def test_a_weight_gradient_is_written_by_its_product_alone_and_read_where_it_lies():
    spec, param = make_param("w", (48, 16))
    optimizer = make_optimizer([(spec, param)])
    watch = watched_step(optimizer, param)
    assert watch.copies == []
    assert watch.writes == ["addmm_", "addmm_"]
    assert optimizer.exp_avg.views["w"].any()


def test_the_watch_sees_a_copy(monkeypatch):
    """The fault that this is for: gradients gathered into another buffer first."""
    spec, param = make_param("w", (48, 16))
    optimizer = make_optimizer([(spec, param)])
    flats = optimizer.grads.state.flats
    monkeypatch.setattr(optimizer.grads, "parts", lambda: [[flat.clone()] for flat in flats])
    assert watched_step(optimizer, param).copies == ["clone"]


class Operations(TorchDispatchMode):
    """Names of the operations that are no views."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names += [] if func.is_view else [func.overloadpacket.__name__]
        return out


def test_fp8_primary_weights_cost_a_step_a_transposition_each_and_little_for_all():
    """Scales come into the layout of GEMMs together, not with two launches a weight."""
    params = [make_param(name, (384, 640)) for name in "abcde"]
    for _, param in params:
        param.owner = Weight(param, get_recipe("blockwise"))
    optimizer = Optimizer(params, AdamWOptions(), seed=1, sharding=Sharding(fp8_primary=True))
    set_grads(optimizer, torch.Generator().manual_seed(0))
    optimizer.step(lr=1e-3, weight_decay=0.1, valid_tokens=4)
    with Operations() as operations:
        for _ in range(3):
            for _, param in params:
                param.owner.operand("fprop", all_copies=True)
                param.owner.operand("dgrad")
    assert sorted(operations.names) == ["clone"] * 5 + ["index_select", "masked_fill_"]
