"""Launches that repeat give the bytes of launches that Triton looks at anew, whatever the alignment and the strides."""

from unittest import mock

import pytest
import torch
from megafp8.kernels import (
    gemm,
    gemm_launch,
    grouped_gemm,
    launch,
    norm_grad,
    norm_quantize,
    quantize,
    quantize_derive,
    rope,
    swiglu_quantize,
    zeros,
)
from triton.runtime.jit import JITFunction

from tests.gpu.quantize_cases import SPECS, normal

CUDA = torch.device("cuda")
CUDA_0 = torch.device("cuda", 0)  # as tensors say it
LAYOUTS = {"aligned": (256, 512), "shifted": (130, 336), "wide rows": (130, 512)}  # and what lies so
BLOCKWISE, SQUARES, TENSOR = (SPECS[name] for name in ("blockwise", "blockwise_2d", "tensorwise"))


def laid_out(x, layout):
    """The same values on the GPU: by themselves, two bytes after an aligned address, or as a part of wider rows."""
    rows, columns = x.shape
    if layout == "shifted":
        place = torch.zeros(rows * columns + 1, dtype=x.dtype, device=CUDA)[1:].view(rows, columns)
    else:
        place = torch.zeros(rows, columns + (24 if layout == "wide rows" else 0), dtype=x.dtype, device=CUDA)
    return place[:, :columns].copy_(x)


def tensors_of(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in tensors_of(part)] if isinstance(value, tuple | list) else []


def copies(value):
    """Copies of all tensors in nested tuples."""
    return [x.view(torch.uint8).clone() if x.element_size() == 1 else x.clone() for x in tensors_of(value)]


def same(found, expected):
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def anew(run, inputs):
    """`run` with nothing known of earlier launches, and nothing of this one afterwards."""
    with mock.patch.dict(launch.known, clear=True), mock.patch.dict(gemm_launch.repeats, clear=True):
        return copies(run(*inputs))


@pytest.fixture
def looks(monkeypatch):
    """The kernels at whose arguments Triton looked."""
    seen, run = [], JITFunction.run
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *a, **more: seen.append(kernel) or run(kernel, *a, **more))
    return seen


def repeats(run, first, second, looks):
    """`run` on `second` once `first`, of the same kind, was seen: bytes as without that, and no look by Triton."""
    expected = anew(run, second)
    run(*first)
    looks.clear()
    same(copies(run(*second)), expected)
    assert not looks, [kernel.__name__ for kernel in looks]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spec", ["blockwise", "blockwise_2d", "tensorwise", "mxfp8"])
@pytest.mark.parametrize("transposed", [False, True])
def test_quantize(transposed, spec, layout, looks):
    def all_copies(x):
        x = x.t() if transposed else x
        return [quantize.quantize(x, SPECS[spec], *wanted) for wanted in ((True, False), (False, True), (True, True))]

    first, second = ([laid_out(normal(*LAYOUTS[layout], seed=s), layout)] for s in (1, 2))
    repeats(all_copies, first, second, looks)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["blockwise", "tensorwise"])
def test_norm_and_its_gradient(name, layout, looks):
    shape = LAYOUTS[layout]
    spec, weight = SPECS[name], laid_out(normal(1, shape[1], seed=9), layout)[0]
    amax = torch.full((1,), 3.0, device=CUDA) if name == "tensorwise" else None

    def both(x, dy):
        made = norm_quantize.rms_norm_quantize(x, weight, spec, colwise=True)
        row = norm_quantize.rms_norm_quantize(x, weight, spec)
        dx, parts = norm_grad.rms_norm_grad(dy, x, weight, made.rstd, beside=dy)
        sums = norm_grad.sum_parts(parts, x.dtype), norm_grad.sum_parts(parts, x.dtype, parts[0].clone(), True)
        grads = dx, parts, sums
        return made, row, grads, norm_quantize.norm_columns_quantize(x, weight, made.rstd, spec, amax=amax)

    first, second = ([laid_out(normal(*shape, seed=s), layout) for s in pair] for pair in ((1, 2), (3, 4)))
    repeats(both, first, second, looks)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["blockwise", "tensorwise"])
def test_swiglu_and_its_gradient(name, layout, looks):
    spec, wide = SPECS[name], LAYOUTS[layout]
    shape = wide[0], wide[1] // 2
    amax = {"y_amax": torch.full((1,), 3.0, device=CUDA)} if name == "tensorwise" else {}

    def both(x, dy):
        row = swiglu_quantize.swiglu_quantize(x, spec, high_precision=True)
        col = swiglu_quantize.swiglu_quantize(x, spec, colwise=True)
        return row, col, swiglu_quantize.swiglu_grad_quantize(dy, x, spec, y_spec=spec, **amax)

    first, second = ([laid_out(normal(*size, seed=s), layout) for size in (wide, shape)] for s in (1, 2))
    repeats(both, first, second, looks)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads(layout, looks):
    angles = torch.rand(70, 32, device=CUDA)

    def both(qkv):
        heads = rope.split_heads(qkv, angles.cos(), angles.sin(), 3)
        return heads, rope.join_heads(*heads, angles.cos(), angles.sin())

    first, second = ([laid_out(normal(70, 2 * 5 * 64, seed=s), layout)] for s in (1, 2))
    repeats(both, first, second, looks)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(("size", "shift"), [((256, 384, 512), 0), ((130, 100, 336), 1)], ids=str)
@pytest.mark.parametrize("kind", ["tensorwise", "1d2d", "1d1d"])
def test_gemm(kind, size, adds, shift):
    """shift: FP32 elements by which the result lies behind an aligned address."""
    m, n, k = size
    specs = {"tensorwise": (TENSOR, TENSOR), "1d2d": (BLOCKWISE, SQUARES), "1d1d": (BLOCKWISE, BLOCKWISE)}[kind]
    function = getattr(gemm, f"gemm_{kind}")

    def run(a, b):
        (a, scale_a), (b, scale_b) = (quantize.quantize(x, spec)[0] for x, spec in zip((a, b), specs, strict=True))
        out = torch.full((m * n + 4,), 0.5, device=CUDA)[shift : shift + m * n].view(m, n)
        function(a, b, scale_a, scale_b, out=out, accumulate=adds)
        return out, function(a, b, scale_a, scale_b, out_dtype=torch.bfloat16)

    first, second = ([normal(m, k, seed=s).to(CUDA), normal(n, k, seed=s + 1).to(CUDA)] for s in (1, 3))
    expected = anew(run, second)
    run(*first)
    for _ in range(2):
        same(copies(run(*second)), expected)


@pytest.mark.parametrize("kind", ["tensorwise", "1d2d"])
def test_grouped_gemms_follow_their_groups(kind, looks):
    """Other numbers of tokens an expert with the same total: the same launch, other results."""
    tokens, n, k, groups = 300, 256, 384, 3
    of_x, of_w = (TENSOR, TENSOR) if kind == "tensorwise" else (BLOCKWISE, SQUARES)
    (x, x_scale), _ = quantize.quantize(normal(tokens, k).to(CUDA), of_x)
    stored = [quantize.quantize(normal(n, k, seed=s).to(CUDA), of_w)[0] for s in range(groups)]
    w = torch.stack([data.view(torch.uint8) for data, _ in stored]).view(x.dtype)
    w_scale = torch.stack([scale for _, scale in stored])
    if kind == "tensorwise":
        x_scale, w_scale = x_scale.repeat(groups), w_scale.view(groups)
    run = getattr(grouped_gemm, f"grouped_gemm_{kind}")
    ends = torch.tensor([[100, 200, 300], [0, 300, 300], [17, 60, 300]], dtype=torch.int32, device=CUDA)
    ends = [row.clone() for row in ends]
    for some in ends[1:]:
        repeats(run, (x, w, x_scale, w_scale, ends[0]), (x, w, x_scale, w_scale, some), looks)


def test_rows_of_experts(looks):
    offsets = torch.tensor([0, 100, 128, 300], dtype=torch.int32, device=CUDA)
    first, second = ([normal(300, 256, seed=s).to(CUDA)] for s in (1, 2))
    repeats(lambda x: quantize_derive.quantize_grouped(x, offsets, BLOCKWISE)[0], first, second, looks)


def test_scales_of_a_history_lie_at_any_address():
    x, scales = normal(128, 256).to(CUDA), torch.tensor([2.0, 3.0, 5.0, 7.0, 11.0], device=CUDA)
    amaxes = torch.zeros(5, device=CUDA)
    for scale, amax in zip(scales.split(1), amaxes.split(1), strict=True):
        found = quantize.quantize(x, TENSOR, True, True, scale=scale, amax_out=amax)
        same(copies(found), anew(lambda scale: quantize.quantize(x, TENSOR, True, True, scale=scale), (scale,)))
    assert torch.equal(amaxes, x.abs().max().float().expand(5))


def test_zeros_are_handed_out_once():
    seen = [zeros.zeros(1, torch.float32, CUDA_0) for _ in range(2000)]
    assert all(x.shape == (1,) and x.data_ptr() % 16 == 0 for x in seen)
    assert len({x.data_ptr() for x in seen}) == len(seen)
    assert not torch.cat(seen).any()
    version = seen[0]._version
    seen[1].add_(1)
    assert seen[0]._version == version  # autograd may keep one while another is written to
    wide = [zeros.zeros(5000, torch.int32, CUDA_0) for _ in range(3)]
    assert len({x.data_ptr() for x in wide}) == 3


def test_another_stream_has_zeros_of_its_own():
    here, stream = zeros.zeros(1, torch.float32, CUDA_0), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        there = zeros.zeros(1, torch.float32, CUDA_0)
    assert here.untyped_storage().data_ptr() != there.untyped_storage().data_ptr()
