"""The project's kernels behind `fp8.gemm`, by role: dense, of experts, and in a training run beside cuBLASLt."""

import pytest
import torch

from megafp8.fp8 import expert_scales, gemm, get_recipe, grouped_matmul, triton_gemm
from tests.fp8.test_grouped_gemm import ends_of, error, operands, random, stacked, with_extra
from tests.gpu.waiting import no_waiting
from tests.training import runs

RECIPES = {
    "tensorwise": get_recipe("tensorwise"),
    "blockwise": get_recipe("blockwise"),
    "blockwise-fp32": get_recipe("blockwise", power_of_two_scales=False),
    "blockwise-hybrid": get_recipe("blockwise", fp8_format="hybrid"),
}
ALL_RECIPES = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
N, K = 70, 200  # of tests/fp8/test_grouped_gemm.py


def moved(storage):
    """The operand on the GPU, strides and all."""

    def move(x):
        out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
        raw = (lambda t: t.view(torch.uint8)) if x.element_size() == 1 else (lambda t: t)
        raw(out).copy_(raw(x))
        return out

    return triton_gemm.QuantizedStorage(
        move(storage.data), move(storage.scale_inv), storage.tile, storage.scale, storage.orientation
    )


@ALL_RECIPES
@pytest.mark.parametrize("shape", [(1, 8, 16), (37, 70, 200), (300, 264, 896), (4092, 712, 130)])
def test_dense_gemms_by_role(recipe, shape):
    """CASES 43, 46, 90: against float64, ragged sizes; wgrad is added where it belongs, as if it were added later."""
    m, n, k = shape
    x = recipe.quantizer("input").quantize(random(m, k, seed=1).cuda(), colwise=True)
    w = recipe.quantizer("weight").quantize(random(n, k, seed=2).cuda(), colwise=True)
    dy = recipe.quantizer("grad_output").quantize(random(m, n, seed=3).cuda(), colwise=True)
    bias = random(n, seed=4).cuda()
    y = gemm.fprop(x.rowwise, w.rowwise, bias, backend="triton")
    x64, w64, dy64 = (q.rowwise.dequantize(torch.float64) for q in (x, w, dy))
    tolerance = 2e-3 if m > 1 else 4e-3  # of few numbers, one that BF16 rounds far may be most of the norm
    assert error(y, x64 @ w64.t() + bias.double()) < tolerance
    assert error(gemm.dgrad(dy.rowwise, w.colwise, backend="triton"), dy64 @ w64) < tolerance
    expected = dy.colwise.dequantize(torch.float64) @ x.colwise.dequantize(torch.float64).t()
    flat = torch.full((n * k + 8,), 0.5, device="cuda")
    out = flat[4:-4].view(n, k)
    assert gemm.wgrad(dy.colwise, x.colwise, out, "triton") is out
    written = gemm.wgrad(dy.colwise, x.colwise, backend="triton")
    assert error(written, expected) < 2e-4
    if recipe.quantizer("input").spec.tile.kind == "tensor":  # may take tiles of another size where it adds
        assert error(out, (0.5 + written).double()) < 2e-4
    else:
        assert torch.equal(out, 0.5 + written)
    assert (flat[:4] == 0.5).all()
    assert (flat[-4:] == 0.5).all()


@ALL_RECIPES
@pytest.mark.parametrize("counts", [[1, 0, 37, 130], [0, 0, 0], [128, 0, 256]], ids=str)
def test_gemms_of_experts_by_role(recipe, counts):
    """CASES 11, 12, 13: experts of any size, NaN past the last, weights and gradients that lie apart."""
    x, dy, w = operands(recipe, counts)
    ends, used = ends_of(counts).cuda(), sum(counts)
    weights = {o: moved(stacked([getattr(q, o) for q in w])) for o in ("rowwise", "colwise")}
    y = gemm.grouped_fprop(moved(with_extra(x.rowwise, 0)), weights["rowwise"], ends, backend="triton")
    dx = gemm.grouped_dgrad(moved(with_extra(dy.rowwise, 0)), weights["colwise"], ends, backend="triton")
    flat = torch.full((len(counts), N * K + 12), 0.5, device="cuda")
    out = flat[:, :-12].unflatten(1, (N, K))
    dy_col, x_col = moved(with_extra(dy.colwise, 1)), moved(with_extra(x.colwise, 1))
    for alignment in (1, 128) if counts[0] in (0, 128) else (1,):
        out.fill_(0.5)
        gemm.grouped_wgrad(dy_col, x_col, ends, out, alignment, "triton")
        written = gemm.grouped_wgrad(dy_col, x_col, ends, None, alignment, "triton")
        assert torch.equal(out, 0.5 + written)
        assert (flat[:, -12:] == 0.5).all()
    dy64, x64 = dy.colwise.dequantize(torch.float64), x.colwise.dequantize(torch.float64)
    start = 0
    for g, end in enumerate(ends.tolist()):
        if end > start:
            weight = w[g].rowwise.dequantize(torch.float64)
            assert error(y[start:end].cpu(), x.rowwise.dequantize(torch.float64)[start:end] @ weight.t()) < 2e-3
            assert error(dx[start:end].cpu(), dy.rowwise.dequantize(torch.float64)[start:end] @ weight) < 2e-3
            assert error(written[g].cpu(), dy64[:, start:end] @ x64[:, start:end].t()) < 2e-4
        else:
            assert not written[g].any()
        start = end
    assert used == start


@ALL_RECIPES
def test_nothing_waits_for_the_device(recipe):
    """Dense and of experts, group sizes known to the device only."""
    counts = [128, 0, 256]
    x, dy, w = operands(recipe, counts)
    ends = ends_of(counts).cuda()
    storages = [moved(s) for s in (x.rowwise, x.colwise, dy.rowwise, dy.colwise)]
    weights = [moved(stacked([getattr(q, o) for q in w])) for o in ("rowwise", "colwise")]
    dense = [moved(w[0].rowwise), moved(w[0].colwise)]
    one = recipe.quantizer("input").quantize(random(64, K, seed=1).cuda()).rowwise
    with no_waiting():
        gemm.fprop(one, dense[0], backend="triton")
        gemm.grouped_fprop(storages[0], weights[0], ends, backend="triton")
        gemm.grouped_dgrad(storages[2], weights[1], ends, backend="triton")
        gemm.grouped_wgrad(storages[3], storages[1], ends, None, 128, "triton")


@pytest.mark.parametrize("counts", [[1, 0, 37, 130], [0, 0, 0], [128, 0, 256]], ids=str)
def test_experts_in_mxfp8_run_as_one(counts):
    """CASES 11, 12, 13: decoded in the kernel, or by block-scaled tensor cores; as the reference, without waiting."""
    recipe, ends = get_recipe("mxfp8"), ends_of(counts).cuda()
    x, dy, w = operands(recipe, counts)
    weights = {o: moved(stacked([getattr(q, o) for q in w])) for o in ("rowwise", "colwise")}
    rows, grads = moved(with_extra(x.rowwise, 0)), moved(with_extra(dy.rowwise, 0))
    columns = moved(with_extra(dy.colwise, 1)), moved(with_extra(x.colwise, 1))
    out = torch.full((len(counts), N, K), 0.5, device="cuda")

    def run():
        y = gemm.grouped_fprop(rows, weights["rowwise"], ends)
        return (
            y,
            gemm.grouped_dgrad(grads, weights["colwise"], ends),
            gemm.grouped_wgrad(*columns, ends, out.fill_(0.5)),
        )

    run()  # compiles
    with no_waiting():
        y, dx, dw = run()
    start = 0
    for g, end in enumerate(ends.tolist()):
        weight, some = w[g].rowwise.dequantize(torch.float64), slice(start, end)
        if end > start:
            assert error(y[some].cpu(), x.rowwise.dequantize(torch.float64)[some] @ weight.t()) < 2e-3
            assert error(dx[some].cpu(), dy.rowwise.dequantize(torch.float64)[some] @ weight) < 2e-3
        want = dy.colwise.dequantize(torch.float64)[:, some] @ x.colwise.dequantize(torch.float64)[:, some].t()
        assert error(dw[g].cpu(), 0.5 + want) < 2e-4
        start = end


@pytest.mark.parametrize(("alignment", "counts"), [(1, [130, 0, 7, 300]), (128, [128, 0, 256, 384])])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_rows_of_experts_with_one_scale_each(power_of_two, alignment, counts):
    """The bytes of the reference, both orientations, without waiting for the experts' sizes."""
    quantizer = get_recipe("tensorwise", power_of_two_scales=power_of_two).quantizer("grad_output")
    used, magnitudes = sum(counts), torch.logspace(-3, 3, sum(counts) + 13)[:, None]
    x = (random(used + 13, K, seed=1) * magnitudes).bfloat16().cuda()
    x[used:] = float("nan")
    ends = ends_of(counts).cuda()
    expert_scales.quantize(quantizer, x, expert_scales.Groups(ends, len(x), alignment), True, True)  # compiles
    with no_waiting():
        got = expert_scales.quantize(quantizer, x, expert_scales.Groups(ends, len(x), alignment), True, True)
    want = quantizer.quantize_grouped(x[:used].cpu(), counts)
    for own, other, dim in ((got.rowwise, want.rowwise, 0), (got.colwise, want.colwise, 1)):
        assert torch.equal(own.data.view(torch.uint8).narrow(dim, 0, used).cpu(), other.data.view(torch.uint8))
        assert torch.equal(own.scale_inv.cpu(), other.scale_inv)


@pytest.mark.parametrize("counts", [[1, 0, 37, 130], [0, 0, 0], [128, 0, 256]], ids=str)
def test_high_precision_experts(counts):
    """BF16 through one grouped kernel; NaN past the last expert."""
    ends, used, n, k = ends_of(counts).cuda(), sum(counts), 72, 200
    x, dy = random(used + 9, k, seed=1).cuda(), random(used + 9, n, seed=2).cuda()
    x[used:] = dy[used:] = float("nan")
    weight = random(len(counts), n, k, seed=3).cuda()
    out = torch.ones(len(counts), n, k, device="cuda")
    with no_waiting():
        y, dx = grouped_matmul.fprop(x, weight, ends), grouped_matmul.dgrad(dy, weight, ends)
        grouped_matmul.wgrad(dy, x, ends, out)
    start = 0
    for g, end in enumerate(ends.tolist()):
        rows = slice(start, end)
        if end > start:
            assert error(y[rows], x[rows].double() @ weight[g].double().t()) < 3e-3
            assert error(dx[rows], dy[rows].double() @ weight[g].double()) < 3e-3
        assert error(out[g], 1 + dy[rows].double().t() @ x[rows].double()) < 3e-3
        start = end


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_a_training_run(recipe, tmp_path, monkeypatch):
    """Twenty iterations through the kernels stay beside those through cuBLASLt, and each GEMM of the run is theirs."""
    prefix, calls = runs.write_corpus(tmp_path), []
    matmul = triton_gemm.matmul
    monkeypatch.setattr(triton_gemm, "matmul", lambda *args: calls.append(args[4:5]) or matmul(*args))
    losses = {}
    for backend in ("triton", "cublaslt"):
        log = tmp_path / backend
        wide = ("--hidden-size", "256", "--ffn-hidden-size", "384", "--seq-length", "128")
        argv = runs.flags(prefix, *runs.RECIPES[recipe], *wide, "--max-position-embeddings", "128", "--device", "cuda")
        assert runs.run(*argv, "--fp8-gemm-backend", backend, "--log-dir", str(log)) == 0
        losses[backend] = [line["lm_loss"] for line in runs.metrics(log)[0]]
    assert len(losses["triton"]) == 20
    assert losses["triton"][-1] < losses["triton"][0] - 0.5
    for ours, theirs in zip(losses["triton"], losses["cublaslt"], strict=True):
        assert abs(ours - theirs) < 0.02 * theirs
    linears, microbatches = 2 * 4, 2
    assert sum(out is not None for (out,) in calls) == 20 * linears * microbatches  # wgrads, added in the epilogue
