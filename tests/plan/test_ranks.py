"""What the planner says one rank of a layout holds, against that rank's real model and optimizer."""

import math

import pytest
import torch

from megafp8.config.parallel import layout_sizes
from megafp8.core.gpt import build_model
from megafp8.core.pipeline.wgrad_queue import WgradQueue
from megafp8.lone import fake_parallel
from megafp8.optimizer import build_optimizer
from megafp8.optimizer.buffers import entry_of
from megafp8.optimizer.groups import default_groups, precision_of
from megafp8.optimizer.sharding import Sharding
from megafp8.parallel import DONE, Axis, ParallelContext
from megafp8.params import specs_in_order
from megafp8.plan.in_flight import operands_bytes
from megafp8.plan.memory import plan_memory, plan_stages
from megafp8.plan.rank_parameters import held_stages, rank_layouts, rank_parameters
from megafp8.plan.shapes import parameters
from megafp8.step import StepContext
from tests.plan.test_memory import BLOCKWISE, EVEN_HEADS, held_for_backward, weight_bytes

FP8 = {"bf16": True, "fp8_format": "e4m3", "fp8_param_gather": True, "use_distributed_optimizer": True}
WIDE = {"num_layers": 4, "hidden_size": 256, "ffn_hidden_size": 512}
SHARDED = {"use_distributed_optimizer": True}
EXPERTS = {"moe_ffn_hidden_size": 256, "moe_shared_expert_intermediate_size": 256}
CASES = {  # world size; kind of model; flags
    "tp": (4, "gpt2", {"tensor_model_parallel_size": 2}),
    "tp, sp, fp8": (4, "qwen", FP8 | {"tensor_model_parallel_size": 2, "sequence_parallel": True, "kv_channels": 64}),
    "dp in buckets": (4, "llama", SHARDED | {"overlap_grad_reduce": True}),
    "ep, tp": (8, "experts", FP8 | EXPERTS | {"expert_model_parallel_size": 4, "tensor_model_parallel_size": 2,
                                              "expert_tensor_parallel_size": 1, "sequence_parallel": True}),
    "ep, cp": (8, "experts", SHARDED | EXPERTS | {"expert_model_parallel_size": 2, "context_parallel_size": 2}),
    "pp": (4, "llama", FP8 | {"pipeline_model_parallel_size": 2}),
    "pp, tied": (2, "gpt2", {"pipeline_model_parallel_size": 2}),
    "uneven pp, vpp": (2, "llama", {"pipeline_model_parallel_size": 2,
                                    "pipeline_model_parallel_layout": "E|ttt|t|L"}),
    "pp, ep, prediction": (8, "deepseek", FP8 | {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2,
                                                 "moe_layer_freq": "[0]*2+[1]*2", "q_lora_rank": 128,
                                                 "moe_ffn_hidden_size": 128, "overlap_grad_reduce": True}),
}  # fmt: skip


def config_of(make, case, **more):
    world, kind, values = CASES[case]
    return make(kind, **{"world_size": world, "global_batch_size": 32} | WIDE | values | more)


def context(config, stage: int) -> ParallelContext:
    """A rank's place, without groups: enough to build a model on the meta device."""
    sizes = layout_sizes(config.parallel)
    axes = {name: Axis(sizes[name]) for name in ("tp", "cp", "dp", "ep", "etp", "edp")}
    joint = {"dp_cp": Axis(sizes["dp"] * sizes["cp"]), "ep_etp": Axis(sizes["ep"] * sizes["etp"])}
    sp = config.parallel.sequence_parallel and sizes["tp"] > 1
    return ParallelContext(**axes, **joint, pp=Axis(sizes["pp"], stage), sequence_parallel=sp)


def real_layouts(config, stage: int, shared: set[str]):
    """The layouts that a rank's optimizer makes of its model, which is built on the meta device."""
    parallel = context(config, stage)
    held = list(specs_in_order(build_model(config, parallel, "meta")))
    groups, entries = default_groups({spec.name: spec for spec, _ in held}), []
    for order, (spec, param) in enumerate(reversed(held)):
        owner = getattr(param, "owner", None)
        primary = config.fp8.fp8_param_gather and owner is not None and owner.recipe is not None
        dtype = owner.recipe.quantizer("weight").spec.format.dtype if primary else param.dtype
        partial = bool(spec.grad_sum_over) or spec.name in shared
        entry = entry_of(spec, param, groups[spec.name], dtype=dtype, partial=partial, order=order)
        entries.append(entry.__class__(**{**vars(entry), "precision": precision_of(spec.name, spec.shape, config)}))
    return Sharding.of(config).plan(entries, parallel)


@pytest.mark.parametrize("case", CASES)
def test_a_ranks_parameters_and_buffers_are_the_real_ones(make, case):
    config = config_of(make, case)
    stages = range(config.parallel.pipeline_model_parallel_size)
    built = [list(specs_in_order(build_model(config, context(config, s), "meta"))) for s in stages]
    names = [{spec.name for spec, _ in held} for held in built]
    for stage in stages:
        planned = {p.name: p.shape for p in rank_parameters(config, stage)}
        assert planned == {spec.name: tuple(param.shape) for spec, param in built[stage]}
        elsewhere = set().union(*(other for s, other in enumerate(names) if s != stage))
        assert rank_layouts(config, stage) == real_layouts(config, stage, names[stage] & elsewhere)


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_together_hold_the_model(make, case):
    """Each parameter once: what ranks hold of it, times the ranks that hold different parts."""
    config = config_of(make, case)
    sizes, total, seen = layout_sizes(config.parallel), {}, set()
    whole = {p.name: p.numel for p in parameters(config)}
    for stage in range(sizes["pp"]):
        for p in rank_parameters(config, stage):
            if p.name not in seen:
                parts = whole[p.name] // p.numel
                assert whole[p.name] == parts * p.numel
                assert parts in (1, sizes["etp"] if p.expert else sizes["tp"]), p.name
                total[p.name] = parts * p.numel * (sizes["ep"] if p.expert else 1)
                seen.add(p.name)
    assert sum(total.values()) == sum(whole.values())


@pytest.mark.parametrize("case", [name for name in CASES if not name.startswith(("pp", "uneven"))])
def test_memory_is_that_of_the_real_optimizer(make, case):
    """Bytes of the tensors that the rank's model and optimizer allocate, each exactly."""
    config = config_of(make, case)
    with fake_parallel(config) as parallel:
        model = build_model(config, parallel, "cpu")
        optimizer = build_optimizer(specs_in_order(model), config, parallel)
    plan = plan_memory(config)
    assert plan.weights == weight_bytes(model)
    assert plan.main_grads == sum(flat.nbytes for flat in optimizer.grads.state.flats)
    assert plan.masters == sum(flat.nbytes for flat in optimizer.masters.flats)
    assert plan.moments == sum(f.nbytes for s in (optimizer.exp_avg, optimizer.exp_avg_sq) for f in s.flats)


def test_ends_of_a_pipeline_hold_more(make):
    """Embedding on the first rank, LM head and logits on the last; a first rank has more microbatches in flight."""
    config = config_of(make, "pp", num_layers=8, pipeline_model_parallel_size=4)
    plans = plan_stages(config)
    assert [plan.pairs for plan in plans] == [4, 3, 2, 1]
    assert plans[0].weights > plans[1].weights == plans[2].weights < plans[3].weights
    assert any(a.what == "logits" for a in plans[3].activations)
    assert not any(a.what == "logits" for plan in plans[:3] for a in plan.activations)
    middle = plans[1]
    assert middle.in_flight == 3 * (middle.held + 20 * 64)
    assert middle.messages == 3 * 64 * 256 * 2
    assert math.isclose(middle.total, sum(middle.owners.values()))


SEQUENCE = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
DENSE_NORM = {"normalization": "LayerNorm", "seq_length": 128, "hidden_size": 256, "num_layers": 2}
EVEN = {"moe_router_force_load_balancing": True, "position_embedding_type": "learned_absolute"}
HELD = {  # world size; kind of model; flags. LayerNorm: on the CPU RMSNorm is taken apart and keeps more
    "tp": (2, "gpt2", {"bf16": True, "tensor_model_parallel_size": 2}),
    "sp": (2, "gpt2", SEQUENCE | {"bf16": True}),
    "sp, blockwise": (2, "llama", SEQUENCE | BLOCKWISE),
    "sp, tensorwise": (2, "llama", SEQUENCE | {"bf16": True, "fp8_format": "hybrid"}),
    "sp, latent": (2, "latent attention", SEQUENCE | BLOCKWISE | EVEN_HEADS),
    "ep": (4, "experts", BLOCKWISE | EVEN | EXPERTS | {"expert_model_parallel_size": 4}),
    "ep, tp, sp": (4, "experts", SEQUENCE | BLOCKWISE | EVEN | EXPERTS | {"expert_model_parallel_size": 2}),
    "tp of experts, sp": (2, "experts", SEQUENCE | BLOCKWISE | EVEN | EXPERTS),
}


@pytest.mark.parametrize("case", HELD)
def test_a_ranks_activations_are_what_autograd_keeps(make, case, monkeypatch):
    """Of one rank, whose collectives give anything; exchanges with experts give what was sent, as even loads would."""
    world, kind, values = HELD[case]
    config = make(kind, world_size=world, **DENSE_NORM | values)
    monkeypatch.setattr(Axis, "post_deal", lambda self, x, sent, received: (x.clone(), DONE))
    with fake_parallel(config) as parallel:
        model = build_model(config, parallel, "cpu")
        held = held_for_backward(model, config)
    assert plan_memory(config).held == pytest.approx(held, rel=0.02)


WAITING = {
    "sp": HELD["sp"],
    "sp, blockwise": HELD["sp, blockwise"],
    "ep": HELD["ep"],
    "latent": (1, "latent attention", BLOCKWISE | EVEN_HEADS),
}


@pytest.mark.parametrize("case", WAITING)
def test_operands_that_wait_are_those_of_the_queue(make, case, monkeypatch):
    """Zero-bubble's weight gradients, against the bytes that the linears' tasks say they hold."""
    world, kind, values = WAITING[case]
    config = make(kind, world_size=world, **DENSE_NORM | values)
    monkeypatch.setattr(Axis, "post_deal", lambda self, x, sent, received: (x.clone(), DONE))
    with fake_parallel(config) as parallel:
        model = build_model(config, parallel, "cpu")
        optimizer = build_optimizer(specs_in_order(model), config, parallel)
        queue = WgradQueue()
        tokens = torch.randint(257, (config.train.micro_batch_size, config.data.seq_length))
        optimizer.zero_grad(1)
        model(tokens, step=StepContext(grads=optimizer.grads, wgrads=queue.slot(0, 0)), labels=tokens).backward()
    (held,) = held_stages(config, 0)
    assert operands_bytes(config, held) == pytest.approx(queue.peak_bytes, rel=0.02)
