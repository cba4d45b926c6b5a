"""What is launched of every kind, for the test that repeats it: each case takes BF16 values and returns its results."""

import torch
from megafp8.kernels import (
    best_experts,
    cross_entropy,
    dequantize,
    gemm,
    grouped_gemm,
    head_norm,
    latent_heads,
    norm_grad,
    norm_quantize,
    operand_stats,
    permute,
    place_rows,
    quantize,
    quantize_derive,
    quantize_experts,
    rope,
    swiglu_quantize,
    three_parts,
)

from megafp8.fp8.quantizer import Quantizer
from tests.gpu.quantize_cases import SPECS, normal

BLOCKWISE, SQUARES, TENSOR, MXFP8 = (SPECS[name] for name in ("blockwise", "blockwise_2d", "tensorwise", "mxfp8"))
ENDS = torch.tensor([64, 100, 256], dtype=torch.int32)
WHOLE = torch.tensor([128, 128, 256], dtype=torch.int32)  # ends of experts that are filled up to whole tiles
ROWS = torch.arange(256).view(128, 2)
ANGLES = torch.rand(256, 32)


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


def fp8(*shape):
    return torch.zeros(shape, dtype=torch.float8_e4m3fn)


def row_scales(rows, blocks):
    return torch.ones(blocks, rows).t()


def stored(x, spec):
    return quantize.quantize(x, spec)[0]


def all_copies(spec):
    return lambda x: [quantize.quantize(x, spec, *wanted) for wanted in ((True, False), (False, True), (True, True))]


def with_a_history(x):
    return quantize.quantize(x, TENSOR, True, True, scale=ones(3)[1:2], amax_out=torch.zeros(3)[2:])


def norm(spec, **amax):
    def run(x):
        made = norm_quantize.rms_norm_quantize(x, x[0].contiguous(), spec, colwise=True)
        row = norm_quantize.rms_norm_quantize(x, x[0].contiguous(), spec, weight_offset=1.0)
        dx, parts = norm_grad.rms_norm_grad(x, x, x[0].contiguous(), made.rstd, beside=x)
        dw = norm_grad.sum_parts(parts, x.dtype), norm_grad.sum_parts(parts, x.dtype, parts[0], True)
        return made, row, dx, dw, norm_quantize.norm_columns_quantize(x, x[0].contiguous(), made.rstd, spec, **amax)

    return run


def swiglu(spec, **amax):
    def run(x):
        dy = x[:, : x.shape[1] // 2].contiguous()
        made = swiglu_quantize.swiglu_quantize(x, spec, high_precision=True, weights=ones(len(x)))
        both = swiglu_quantize.swiglu_quantize(x, spec, colwise=True)
        return made, both, swiglu_quantize.swiglu_grad_quantize(dy, x, spec, y_spec=spec, **amax)

    return run


def of_bytes(x):
    data, scale_inv = stored(x, BLOCKWISE)
    return (
        swiglu_quantize.swiglu_quantize((data, scale_inv), BLOCKWISE),
        quantize_derive.derive_colwise(data, scale_inv, BLOCKWISE),
        quantize_derive.transpose(data),
        dequantize.dequantize(data, scale_inv, BLOCKWISE.tile),
    )


def experts(x):
    offsets = torch.cat([ENDS[:1] * 0, ENDS])
    index = torch.arange(256)
    return (
        quantize_derive.quantize_grouped(x, offsets, BLOCKWISE),
        quantize_derive.quantize_grouped(x, offsets, BLOCKWISE, index=index, derived=True),
        permute.spread(x, index),
        permute.sums(x, ROWS, ROWS > 3),
    )


def experts_with_one_scale_each(x):
    """Experts of 128 rows and of none; SwiGLU from values and from bytes."""
    dy, index = x[:, : x.shape[1] // 2].contiguous(), torch.arange(256)
    amax = quantize_experts.expert_amaxes(quantize_experts.row_amaxes(x), WHOLE, index)
    options = {"ends": WHOLE, "weights": ones(256)}
    return (
        amax,
        quantize_experts.expert_amaxes(ones(256), WHOLE),
        quantize_experts.quantize_experts(x, WHOLE, TENSOR, True, True, amax=ones(3), index=index),
        quantize_experts.quantize_experts(x, WHOLE, TENSOR, True, False, scale=ones(3)),
        swiglu_quantize.swiglu_quantize(x, TENSOR, x_spec=BLOCKWISE, **options),
        swiglu_quantize.swiglu_grad_quantize(
            dy, stored(x, BLOCKWISE), TENSOR, y_spec=TENSOR, y_amax=ones(3), **options
        ),
    )


def routing(x):
    chosen = torch.zeros(64, 4, dtype=torch.int64)
    return (
        best_experts.best(x[:, :32].float(), 4),
        place_rows.place(chosen, 8, 128, 1280),
        place_rows.arrange(torch.zeros(2, 8, dtype=torch.int64), 128, 256, 1280),
        three_parts.three_parts(x[:, :32].float()),
        permute.spread(ones(256, 1), torch.arange(256)),
        permute.sums(ones(256, 1), torch.arange(256)[:, None], torch.ones(256, 1, dtype=torch.bool)),
    )


def stacks(x):
    data, codes = fp8(3, 64, 96), torch.zeros(3, 64, 3, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    return (
        quantize_derive.transpose(data[:, :32]),
        dequantize.dequantize(data, codes, MXFP8.tile, torch.bfloat16),
        dequantize.dequantize(data[1], codes[1], MXFP8.tile, torch.bfloat16, transposed=True),
    )


def heads(x):
    cos, sin = ANGLES[: len(x)].cos(), ANGLES[: len(x)].sin()
    qkv, weights = x[:, :320].contiguous(), (x[0, :64].contiguous(), x[1, :64].contiguous())
    plain = rope.split_heads(qkv, cos, sin, 3)
    normed = head_norm.norm_heads(qkv, weights, cos, sin, 3, eps=1e-5)
    back = head_norm.norm_heads_grad(*normed, qkv, weights, cos, sin, eps=1e-5)
    tails = latent_heads.turn_tails(x[:, :256].reshape(-1, 2, 128), cos, sin, back=True)
    latent = latent_heads.keys_and_values(x[:, :256].contiguous(), x[:, :64].contiguous(), cos, sin, 2, 64)
    return plain, rope.join_heads(*plain, cos, sin), normed, back, tails, latent_heads.keys_and_values_grad(
        *latent, cos, sin
    )  # fmt: skip


def loss(x):
    labels, logits = torch.arange(len(x)), x.float()
    top, total, picked = cross_entropy.loss_rows(logits, 300, labels)
    cross_entropy.loss_grad(
        logits, logits, labels, top, total, ones(len(x)), 300, first=0, smoothing=0.1, vocab_size=300, z=0.0
    )
    cross_entropy.scale(logits, ones(1))
    return top, total, picked


def products(x):
    """Dense GEMMs of each kind; results in BF16, in FP32, added, behind an address that TMA doesn't reach."""
    m, k = x.shape
    a, b, out, apart = fp8(m, k), fp8(384, k), ones(m, 384), ones(m * 384 + 1)[1:].view(m, 384)
    rows, columns, squares = row_scales(m, -(-k // 128)), row_scales(384, -(-k // 128)), ones(3, -(-k // 128))
    return [
        gemm.gemm_tensorwise(a, b, ones(1), ones(1)),
        gemm.gemm_tensorwise(a, b, ones(1), ones(1), bias=ones(384), fast_accum=True),
        gemm.gemm_tensorwise(a, b, ones(1), ones(1), out=out, accumulate=True),
        gemm.gemm_1d2d(a, b, rows, squares, bias=ones(384)),
        gemm.gemm_1d2d(a, b, rows, squares.t().contiguous().t(), out=apart),
        gemm.gemm_1d1d(a, b, rows, columns, out=out, accumulate=True),
        gemm.gemm_1d1d(a, b, rows, columns, out=apart, accumulate=True),
        gemm.gemm_1d1d(a, b, rows, columns),
        gemm.gemm_1d1d(a, b, rows, columns, backend="tl"),
    ]


def grouped_products(x):
    a, b, w = fp8(256, 512), fp8(3, 384, 512), fp8(384, 256)
    return [
        grouped_gemm.grouped_gemm_tensorwise(a, b, ones(3), ones(3), ENDS),
        grouped_gemm.grouped_gemm_1d2d(a, b, row_scales(256, 4), ones(3, 3, 4), ENDS),
        grouped_gemm.grouped_wgrad_1d1d(w, w, row_scales(384, 5), row_scales(384, 5), ENDS, padding=16),
        grouped_gemm.grouped_wgrad_1d1d(
            w, w, row_scales(384, 5), row_scales(384, 5), ENDS, padding=16, out=ones(3, 384, 384), accumulate=True
        ),
    ]


def monitor(x):
    """The monitor's, with values and without, and of masters."""
    row = operand_stats.Row(torch.zeros(6, dtype=torch.float64), ones(4)[:3], torch.zeros(1024, dtype=torch.int64))
    for spec in (BLOCKWISE, SQUARES, MXFP8, TENSOR):
        storage = Quantizer(spec).store_pair(stored(x, spec), None).rowwise
        operand_stats.look(row, x, storage, 464.0, 1 << 16)
        operand_stats.look(row, None, storage, 464.0, 1 << 16)
        operand_stats.look_at_errors(row, x.reshape(-1)[: x.numel() // 2], storage, 464.0, 16)
    return row


CASES = {
    "blockwise": all_copies(BLOCKWISE),
    "blockwise weights": all_copies(SQUARES),
    "mxfp8": all_copies(MXFP8),
    "tensorwise": all_copies(TENSOR),
    "delayed": with_a_history,
    "norm, blockwise": norm(BLOCKWISE),
    "norm, tensorwise": norm(TENSOR, amax=ones(1)),
    "SwiGLU, blockwise": swiglu(BLOCKWISE),
    "SwiGLU, tensorwise": swiglu(TENSOR, y_amax=ones(1)),
    "bytes": of_bytes,
    "experts": experts,
    "experts with one scale each": experts_with_one_scale_each,
    "stacks": stacks,
    "routing": routing,
    "heads": heads,
    "loss": loss,
    "monitor": monitor,
    "GEMMs": products,
    "grouped GEMMs": grouped_products,
}
# GEMMs whose operands are copied first, or that nobody repeats in place, are launched by the next best way.
ALIGNED, SHIFTED, WIDE = "aligned", "shifted", "wide rows"


def source(layout, seed, shape=(256, 512)):
    """BF16 values: by themselves, two bytes behind an aligned address, or as a part of wider rows."""
    rows, columns = shape
    if layout == SHIFTED:
        return normal(1, rows * columns + 8, seed=seed)[0, 1 : rows * columns + 1].view(rows, columns)
    return normal(rows, columns + (24 if layout == WIDE else 0), seed=seed)[:, :columns]
