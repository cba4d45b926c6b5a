"""The ledger of format conversions: what it says of a layer, what it makes of a profiler's list, and its page."""

from pathlib import Path

import bench_step
import pytest
from kernel_names import unlisted

from megafp8.plan.conversions import conversions, markdown

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20


def ledger(recipe, *argv, preset="llama3-8b"):
    args = bench_step.arguments().parse_args(["--preset", preset, *argv])
    args.device = "cpu"
    return {(c.place.removeprefix("layers.*."), c.when): c for c in conversions(bench_step.config_of(args, recipe))}


def test_what_a_llama_layer_converts():
    """Two copies of qkv's input in the norm's kernel, fc2's input and fc1's dY in SwiGLU's, the rest on their own."""
    found = ledger("blockwise")
    rows, scales = 8192, 4 / 128
    qkv = found["attention.qkv input", "forward"]
    assert (qkv.fused, qkv.times) == ("RMSNorm", 6)
    assert qkv.nbytes == rows * 4096 * 2 * (1 + scales)
    assert found["mlp.fc2 input", "backward"].fused == "SwiGLU's gradient"
    assert found["mlp.fc1 grad_output", "backward"].nbytes == rows * 28672 * 2 * (1 + scales)
    alone = [key for key, c in found.items() if not c.fused and "weight" not in key[0]]
    assert alone == [
        ("attention.qkv grad_output", "backward"), ("attention.proj input", "forward"),
        ("attention.proj input", "backward"), ("attention.proj grad_output", "backward"),
        ("mlp.fc2 grad_output", "backward"), ("embedding: gradient", "backward"), ("tokens, labels, masks", "forward"),
        ("skip flag, statistics", "update"),
    ]  # fmt: skip
    assert found["attention.proj input", "forward"].nbytes == rows * 4096 * (2 + 1 + scales)
    tensorwise = ledger("tensorwise")["attention.proj input", "forward"]
    assert tensorwise.nbytes == rows * 4096 * (2 * 2 + 1) + 4  # the amax first
    again = ledger("tensorwise")["attention.proj input", "backward"]
    assert again.nbytes == rows * 4096 * (2 + 1) + 4  # which is kept
    assert ledger("blockwise, FP8 weights")["mlp.fc1 weight", "update"].fused == "AdamW"
    assert ("mlp.fc1 weight", "forward") not in ledger("blockwise, FP8 weights")


def test_flags_move_the_ledger():
    kept = ledger("blockwise", "--flags", "--keep-modules-in-bf16 *.fc1 --fp8-input-tile 2d --fp8-weight-tile 1d")
    assert not any("fc1" in place for place, _ in kept)
    assert kept["attention.qkv input", "forward"].fused == ""  # no kernel makes square tiles of a norm's output
    assert not any("qkv" in place for place, _ in ledger("bf16"))
    experts = ledger("blockwise", preset="qwen3-30b-a3b")
    router = experts["mlp.router gradient of the logits", "backward"]
    assert (router.target, router.nbytes, router.times) == ("3 x bf16", 32768 * 128 * (4 + 3 * 2), 4)
    wide = ledger("blockwise", "--flags", "--moe-router-dtype fp64", preset="qwen3-30b-a3b")
    assert wide["mlp.router", "forward, backward"].target == "fp64"
    assert experts["mlp.experts.*.fc1 input", "forward"].fused == "rows of experts"
    assert experts["mlp.experts.*.fc1 weight", "forward"].times == 4 * 128
    each = ledger("tensorwise", preset="qwen3-30b-a3b")  # a scale an expert, known before rows are made
    made = (
        {"fc1 input": "rows of experts", "fc2 input": "SwiGLU"},
        {
            "fc1 grad_output": "SwiGLU's gradient",
            "fc2 grad_output": "rows of experts",
            "fc2 input": "SwiGLU's gradient",
        },
    )
    for when, places in zip(("forward", "backward"), made, strict=True):
        for place, inside in places.items():
            assert each[f"mlp.experts.*.{place}", when].fused == inside
    tokens, rows = 32768 * 2048, 8 * 32768 * 2048
    assert each["mlp.experts.*.fc1 input", "forward"].nbytes == 2 * rows + 2 * tokens + 2 * 4
    assert each["mlp.experts.*.fc2 input", "forward"].orientations == "row"


def passes(names, *rest, ms=0.1):
    """short name -> launches of what the ledger lacks."""
    return {name: count for name, (count, _) in unlisted(((name, ms) for name in names), *rest).passes.items()}


def test_kernels_that_the_ledger_lacks_are_named():
    found = list(ledger("blockwise").values())
    known = ["norm_both_kernel", "swiglu_grad_kernel", "quantize_1d_kernel", "nvjet_sm90", "Memcpy HtoD (Pinned)"]
    known += ["void flash_bwd_convert_dq_kernel", "ncclDevKernel_Broadcast", "gemm_kernel", "norm_grad_kernel"]
    known += ["_ZN7cutlass13device_kernelI4gemm18KernelPtrArrayCopy"]  # a word in a template isn't what it does
    known += ["triton_poi_fused__to_copy_add_cat_mul_3"]  # torch.compile's, which names all that it fused
    assert passes(known, found) == {}
    copy = "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>"
    allowed = sum(c.launches or 0 for c in found)
    assert allowed == 1  # the embedding's gradient
    assert passes([copy] * allowed, found) == {}
    assert passes([copy] * 2 * allowed, found, 2) == {}
    assert passes([copy] * (allowed + 2), found) == {"direct_copy_kernel_cuda": 2}
    others = passes(["transpose_kernel", "my_cast_to_fp4", "Memcpy DtoD (Device)"], found[:1])
    assert list(others) == ["transpose_kernel", "my_cast_to_fp4", "Memcpy DtoD"]


def test_small_launches_are_only_counted():
    """Else bookkeeping of scalars would hide passes over real tensors, and use up what the ledger allows."""
    found = list(ledger("blockwise").values())
    fill = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >"
    copy = "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>"
    more = unlisted([(fill, 0.002), (copy, 0.001), ("Memset (Device)", 0.001), (fill, 2.0), (copy, 0.05)], found)
    assert more.passes == {"FillFunctor<float>": [1, 2.0]}
    assert more.small == [3, pytest.approx(0.004)]
    assert unlisted([("my_cast_to_fp4", 0.001)], found).passes == {"my_cast_to_fp4": [1, 0.001]}  # a recipe's own


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
def test_the_page_has_the_ledger(recipe):
    page = (ROOT / "docs" / "conversions.md").read_text()
    assert "\n".join(markdown(list(conversions_of(recipe)))) in page


def conversions_of(recipe):
    args = bench_step.arguments().parse_args([])
    args.device = "cpu"
    return conversions(bench_step.config_of(args, recipe))
