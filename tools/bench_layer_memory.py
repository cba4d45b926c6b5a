"""What one transformer layer holds for backward, by module and option, and how fast it runs with the same flags.

Bytes are counted by the planner's formulas (megafp8/plan), which need no GPU; on a GPU they stand next to what the
allocator holds after the second microbatch's forward: the layer's input is counted, its output and the FP8 copies of
weights are not. Times are of forward and backward, weight gradients added into FP32 buffers; next to them a plain
BF16 layer under torch.compile.

    python tools/bench_layer_memory.py                                     # Llama-3-8B's layer, 2 x 4096 tokens
    python tools/bench_layer_memory.py --model llama3-70b --micro-batch-size 1 --output layer.json
    python tools/bench_layer_memory.py --options bf16 blockwise --flags "--recompute-granularity selective
        --recompute-modules layernorm"
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_timing
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from megafp8.config import Config, parse_args, with_vocab_size
from megafp8.core.build import BuildContext
from megafp8.core.gpt import initialize
from megafp8.core.transformer.core_attention import Sequences
from megafp8.core.transformer.layer import TransformerLayer
from megafp8.core.transformer.rope import Rotation, inverse_frequencies, rotation
from megafp8.fp8 import DelayedScaling, policy
from megafp8.parallel import ParallelContext
from megafp8.params import GradSink, named_specs
from megafp8.plan.activations import layer_activations
from megafp8.step import StepContext

MIB = 2**20
MODELS = {
    "llama3-8b": "--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --num-query-groups 8",
    "llama3-70b": "--hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 --num-query-groups 8",
    "small": "--hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4 --num-query-groups 2",
    "tiny": "--hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4 --num-query-groups 2",
}
COMMON = (
    "--num-layers 1 --group-query-attention --normalization RMSNorm --position-embedding-type rope --swiglu "
    "--disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --untie-embeddings-and-output-weights --bf16 "
    "--lr 1e-4 --train-iters 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 1023"
)
STORE = "--activation-func-fp8-input-store"
OPTIONS = {
    "bf16": "",
    "blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
    "blockwise, fc1 in FP8": f"--fp8-format e4m3 --fp8-recipe blockwise {STORE}",
    "tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
    "tensorwise, fc1 in FP8": f"--fp8-format hybrid --fp8-recipe tensorwise {STORE}",
    "delayed": "--fp8-format hybrid --fp8-recipe delayed",
    "blockwise, own GEMMs": "--fp8-format e4m3 --fp8-gemm-backend triton",
    "tensorwise, own GEMMs": "--fp8-format hybrid --fp8-gemm-backend triton",
    "blockwise, norms again": "--fp8-format e4m3 --recompute-granularity selective --recompute-modules layernorm",
    "blockwise, mlp again": "--fp8-format e4m3 --recompute-granularity selective --recompute-modules mlp",
}


def config_of(args: argparse.Namespace, option: str, ranks: int = 1) -> Config:
    """The configuration of a layer under an option, on one of `ranks` ranks; raises ValueError for flags that don't go
    together."""
    sizes = f"--seq-length {args.seq_length} --micro-batch-size {args.micro_batch_size}"
    flags = " ".join((MODELS[args.model], COMMON, sizes, OPTIONS[option], args.flags))
    return with_vocab_size(parse_args(shlex.split(flags), env={"WORLD_SIZE": str(ranks)}), 1024)


class Gradients(GradSink):
    """FP32 buffers that weight gradients are added into."""

    def __init__(self, layer: nn.Module) -> None:
        self.buffers = {id(p): torch.zeros(p.shape, device=p.device) for p in layer.parameters()}

    def buffer(self, param: Tensor) -> Tensor:
        return self.buffers[id(param)]

    def ready(self, param: Tensor) -> None:
        pass


@torch.no_grad()
def lay_side_by_side(layer: nn.Module, buffers: dict[int, Tensor]) -> None:
    """Puts experts' weights, and their gradients' buffers, where the optimizer keeps them: those that are multiplied
    together in one piece, of which nobody has to make a copy."""
    stacks: dict[str, list[nn.Parameter]] = {}
    for spec, param in sorted(named_specs(layer), key=lambda pair: pair[0].stack or ("", 0)):
        if spec.stack is not None:
            stacks.setdefault(spec.stack[0], []).append(param)
    for params in stacks.values():
        values = torch.stack([param.detach() for param in params])
        zeros = torch.zeros(values.shape, device=values.device)
        for param, value, buffer in zip(params, values, zeros, strict=True):
            param.data = value
            if id(param) in buffers:
                buffers[id(param)] = buffer


class Layer:
    """The first layer of a configuration on a device, and what its forward needs."""

    def __init__(self, config: Config, device: torch.device, parallel: ParallelContext | None = None) -> None:
        """parallel: of the rank that it is a layer of; alone if not given."""
        parallel = parallel or ParallelContext()
        build = BuildContext.of(config, parallel, device, policy.from_config(config))
        self.config, model = config, config.model
        self.layer = TransformerLayer("layers.0", build, experts=model.num_experts is not None)
        initialize(self.layer, 1)
        batch, length = config.train.micro_batch_size, config.data.seq_length
        tokens = batch * length // (parallel.tp.size if parallel.sequence_parallel else 1)
        self.x = torch.randn(tokens, model.hidden_size, device=device).bfloat16().requires_grad_()
        self.dy = torch.randn_like(self.x)
        positions = torch.arange(length, device=device).repeat(batch)
        self.sequences = Sequences(batch, length, rotation(positions, inverse_frequencies(model, device)))
        self.scaling = DelayedScaling.of(self.layer)
        gradients = Gradients(self.layer)
        lay_side_by_side(self.layer, gradients.buffers)
        self.step = StepContext(grads=gradients, scaling=self.scaling)

    def forward(self) -> Tensor:
        return self.layer(self.x, self.sequences, self.step)

    def microbatch(self) -> None:
        for tensor in (self.x, *self.layer.parameters()):
            tensor.grad = None
        self.forward().backward(self.dy)

    def held(self) -> int:
        """Bytes that the allocator was asked for and that backward waits for, from the second microbatch on."""
        self.microbatch()
        if self.scaling is not None:
            self.scaling.advance()
            self.microbatch()
        for tensor in (self.x, *self.layer.parameters()):
            tensor.grad = None
        gc.collect()
        before = _requested()
        y = self.forward()
        held = _requested() - before - y.nbytes + self.x.nbytes
        y.backward(self.dy)
        return held


def _requested() -> int:
    """Bytes asked for and not freed; the allocator's blocks may be larger."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


class PlainLayer(nn.Module):
    """The same layer in a few lines of PyTorch, for torch.compile: the rival."""

    def __init__(self, config: Config, device: torch.device) -> None:
        super().__init__()
        m = config.model
        self.heads, self.groups, self.channels = m.num_attention_heads, m.num_query_groups, m.kv_channels
        shapes = {
            "qkv": (m.hidden_size, (self.heads + 2 * self.groups) * self.channels),
            "proj": (self.heads * self.channels, m.hidden_size),
            "fc1": (m.hidden_size, 2 * m.ffn_hidden_size),
            "fc2": (m.ffn_hidden_size, m.hidden_size),
        }
        for name, shape in shapes.items():
            setattr(self, name, nn.Linear(*shape, bias=False, device=device, dtype=torch.bfloat16))
        ones = torch.ones(2, m.hidden_size, device=device, dtype=torch.bfloat16)
        self.norms = nn.ParameterList(nn.Parameter(row.clone()) for row in ones)

    def forward(self, x: Tensor, turn: Rotation) -> Tensor:
        """x: [batch, length, hidden]; turn: of one sequence."""
        cos, sin = (t[:, None] for t in turn)

        def turned(heads: Tensor) -> Tensor:
            a, b = heads.float().chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(heads.dtype).transpose(1, 2)

        h = F.rms_norm(x, x.shape[-1:], self.norms[0], 1e-5)
        heads = self.qkv(h).unflatten(-1, (-1, self.channels))
        q, k, v = heads.split((self.heads, self.groups, self.groups), 2)
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
            out = F.scaled_dot_product_attention(
                turned(q), turned(k), v.transpose(1, 2), is_causal=True, enable_gqa=True
            )
        x = x + self.proj(out.transpose(1, 2).flatten(2))
        gate, up = self.fc1(F.rms_norm(x, x.shape[-1:], self.norms[1], 1e-5)).chunk(2, -1)
        return x + self.fc2(F.silu(gate) * up)


def rival(config: Config, device: torch.device) -> Callable[[], None]:
    """Forward and backward of the plain layer, compiled, with BF16 gradients."""
    layer = PlainLayer(config, device)
    compiled = torch.compile(layer)
    batch, length = config.train.micro_batch_size, config.data.seq_length
    x = torch.randn(batch, length, config.model.hidden_size, device=device).bfloat16().requires_grad_()
    dy = torch.randn_like(x)
    turn = rotation(torch.arange(length, device=device), inverse_frequencies(config.model, device))

    def run() -> None:
        for tensor in (x, *layer.parameters()):
            tensor.grad = None
        compiled(x, turn).backward(dy)

    return run


def breakdown(run: Callable[[], None]) -> dict[str, dict[str, float]]:
    """Kernel class -> {ms, launches} of one call."""
    table: dict[str, dict[str, float]] = {}
    for kernel in bench_timing.kernels(run, torch.device("cuda")):
        entry = table.setdefault(kernel_class(kernel.name), {"ms": 0.0, "launches": 0})
        entry["ms"] += kernel.ms
        entry["launches"] += 1
    return table


CLASSES = {
    "attention": ("flash", "fmha", "sdpa", "cudnn_generated", "attention"),
    "quantize": ("quantize", "cast_kernel", "amax_kernel", "transpose_kernel", "swiglu", "norm_rows", "norm_tiles"),
    "norm": ("norm", "gammabeta", "gamma_beta"),
    "heads": ("heads_kernel",),
    "gemm": ("gemm", "cutlass", "nvjet", "xmma", "matmul", "splitk"),
    "copies": ("memcpy", "memset", "copy_kernel", "direct_copy"),
}
"""Words in the names of kernels, by class; the first class that has one."""


def kernel_class(name: str) -> str:
    found = (kind for kind, words in CLASSES.items() if any(word in name.lower() for word in words))
    return next(found, "elementwise")


def measure(args: argparse.Namespace, option: str, device: torch.device) -> dict[str, Any]:
    """The record of one option."""
    config = config_of(args, option)
    counted = layer_activations(config, device)
    record: dict[str, Any] = {
        "option": option,
        "counted": {f"{a.module}: {a.what}": a.bytes for a in counted},
        "counted_bytes": sum(a.bytes for a in counted),
    }
    if device.type == "cuda":
        layer = Layer(config, device)
        record["allocated_bytes"] = layer.held()
        record["ms"] = bench_timing.milliseconds(layer.microbatch, device, args.repeats)
        if args.breakdown:
            record["kernels"] = breakdown(layer.microbatch)
    return record


def show(records: list[dict[str, Any]], rival_ms: float | None) -> str:
    """The tables: bytes by module, one option below the other, then what an option comes to."""
    lines, base = [], records[0]
    for record in records:
        lines.append(f"{record['option']}: what is held for backward, MiB by count")
        lines += [f"  {size / MIB:8.1f}  {what}" for what, size in record["counted"].items()]
    lines.append("")
    lines.append(f"{'':24}{'counted':>9}{'allocated':>11}{'of ' + base['option']:>9}{'ms':>8}{'speed-up':>10}")
    for record in records:
        held = record.get("allocated_bytes", record["counted_bytes"])
        ratio = held / base.get("allocated_bytes", base["counted_bytes"])
        line = f"{record['option']:24}{record['counted_bytes'] / MIB:9.1f}"
        line += f"{record['allocated_bytes'] / MIB:11.1f}" if "allocated_bytes" in record else f"{'-':>11}"
        line += f"{ratio:9.3f}"
        if "ms" in record:
            line += f"{record['ms']:8.2f}{(rival_ms or base['ms']) / record['ms']:10.2f}"
        lines.append(line)
        for kind, entry in record.get("kernels", {}).items():
            lines.append(f"    {entry['ms']:7.3f} ms in {entry['launches']:3.0f} launches  {kind}")
    if rival_ms is not None:
        lines.append(f"{'plain BF16, compiled':24}{'':29}{rival_ms:8.2f}{1:10.2f}")
    return "\n".join(lines)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama3-8b", help="whose layer (default: %(default)s)")
    parser.add_argument("--seq-length", type=int, default=4096, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--micro-batch-size", type=int, default=2, help="sequences (default: %(default)s)")
    parser.add_argument("--options", nargs="+", choices=OPTIONS, default=list(OPTIONS)[:5], help="rows of the table; "
                        "the first is what the others are compared with")  # fmt: skip
    parser.add_argument("--flags", default="", help="training flags for all options, in one string")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="cpu: counts only")
    parser.add_argument("--repeats", type=int, default=10, help="timed microbatches (default: %(default)s)")
    parser.add_argument("--no-rival", action="store_true", help="leave out the compiled BF16 layer")
    parser.add_argument("--breakdown", action="store_true", help="time and launches by class of kernel")
    parser.add_argument("--output", type=Path, help="JSON file for the records")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = arguments().parse_args(argv)
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    device = torch.device(chosen)
    try:
        records = [measure(args, option, device) for option in args.options]
    except ValueError as error:
        print(f"bench_layer_memory: {error}", file=sys.stderr)
        return 2
    rival_ms = None
    if device.type == "cuda" and not args.no_rival:
        run = rival(config_of(args, args.options[0]), device)
        rival_ms = bench_timing.milliseconds(run, device, args.repeats)
    print(show(records, rival_ms))
    if args.output:
        sizes = {"model": args.model, "seq_length": args.seq_length, "micro_batch_size": args.micro_batch_size}
        args.output.write_text(json.dumps(sizes | {"rival_ms": rival_ms, "records": records}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
