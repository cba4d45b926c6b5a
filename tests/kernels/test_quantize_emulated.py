"""Byte tests of the quantization kernels as compiled for Hopper, run by the PTX emulator: no GPU needed.

The same tests run in full on a GPU (tests/gpu). The emulator also raises on shared-memory races, misaligned and
out-of-bounds accesses.
"""

import re

import numpy as np
import pytest
import torch
from megafp8.kernels import quantize

from megafp8.core.transformer import activation, norm
from tests.cases import quick
from tests.gpu import (
    test_quantize,
    test_quantize_derive,
    test_quantize_experts,
    test_quantize_fused,
    test_quantize_producers,
    test_shared_amax,
)
from tests.gpu.quantize_cases import EMULATING, ONE_D, SPECS, assert_same, expected, holes, normal, subnormal, wide
from tests.kernels import testing
from tests.kernels.ptx_shared import SharedMemory

pytestmark = pytest.mark.skipif(not EMULATING, reason="tests/gpu runs these on the GPU that is here")


@pytest.fixture(autouse=True)
def _emulator():
    with testing.emulated_launches():
        yield


@pytest.mark.parametrize("file", test_quantize.GOLDEN[:1] + test_quantize.GOLDEN[2:3], ids=lambda path: path.stem)
def test_golden_vectors(file):
    test_quantize.test_golden_vectors(file)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_recipes(spec):
    """CASES 07 among them: zero rows, columns and blocks; NaN and Inf; the whole range of BF16; subnormals."""
    for make in (holes, wide):
        test_quantize.check(make(128, 256), spec, what=make.__name__)
    test_quantize.check(subnormal(128, 256, torch.bfloat16), spec, what="subnormal")


@pytest.mark.parametrize("name", ["blockwise", "mxfp8", "blockwise_2d", "tensorwise"])
def test_ragged_rows_alone_columns_alone(name):
    x = holes(130, 67)
    test_quantize.check(x, SPECS[name], True, False)
    test_quantize.check(x, SPECS[name], False, True)


@pytest.mark.parametrize("name", quick(["blockwise", "mxfp8_2d", "tensorwise"], {"blockwise", "tensorwise"}))
def test_strided_inputs(name):
    """CASES 41."""
    test_quantize.test_strided_inputs_give_what_their_contiguous_copies_give(name)


@pytest.mark.parametrize("shape", [(0, 256), (256, 0)], ids=str)
def test_empty_tensors(shape):
    for spec in SPECS.values():
        test_quantize.test_empty_tensors(shape, spec)


@pytest.mark.parametrize("name", quick(["blockwise", "blockwise_2d", "tensorwise"], {"blockwise", "tensorwise"}))
def test_amaxes_in_and_out_and_the_device_flag(name):
    test_quantize.test_amax_and_quantization_under_a_given_amax(SPECS[name])
    test_quantize.test_device_flag_turns_a_weight_update_off(name)


def test_scales_from_amaxes():
    """CASES 09, 38, 39, and every edge of the bits that powers of two are made from."""
    test_quantize.test_mxfp8_codes_round_up()
    test_quantize.test_power_of_two_scales_round_down("blockwise")
    test_quantize.test_fp32_scale_of_a_bf16_amax()
    test_quantize.test_scale_boundaries_of_every_significand()


def test_delayed_scaling_records_the_amax():
    test_quantize.test_given_scale_saturates_and_records_the_amax("tensorwise", 3.0)
    test_quantize.test_current_scaling_reports_its_amax()


def test_layout_guards_and_mistakes():
    test_quantize.test_outputs_are_written_completely_and_nothing_beside_them()
    test_quantize.test_scales_lie_as_gemms_want_them()
    test_quantize.test_users_mistakes_are_named()


@pytest.mark.parametrize("name", ["blockwise", "mxfp8"])
def test_copies_from_bytes_and_experts_rows(name):
    derive = test_quantize_derive
    derive.test_colwise_copy_from_rowwise_bytes(holes, (130, 176), SPECS[name])
    derive.test_experts_tiles_restart_at_their_first_rows([130, 0, 7], SPECS[name])
    derive.test_deriving_under_fp32_scales_is_refused()


def test_experts_aligned_rows_bytes_and_rewrites():
    derive = test_quantize_derive
    derive.test_experts_aligned_rows([128, 0, 256, 16])
    derive.test_experts_colwise_copies_from_bytes([16, 32])
    derive.test_rows_past_the_last_offset_are_left_alone()
    derive.test_transpose((130, 176))
    derive.test_blockwise_rewritten_as_mxfp8((130, 176), "1d")
    derive.test_blockwise_rewritten_as_mxfp8((130, 176), "2d")


def test_rows_by_index_and_columns_derived_from_rows():
    test_quantize_derive.test_dispatch_of_values_and_of_bytes_agree([70, 0, 26], SPECS["mxfp8"])
    test_quantize_derive.test_dispatch_of_values_and_of_bytes_agree([96], SPECS["blockwise_epsilon"])


def test_producers_under_tensor_tiles():
    test_quantize_producers.test_norm_under_tensor_tiles((12, 256), "tensorwise")
    test_quantize_producers.test_swiglu_with_row_weights((20, 128), "tensorwise_e5m2")
    test_quantize_producers.test_first_passes_walk_over_all_tiles(-1)


@pytest.mark.parametrize("rows", [0, 7])
def test_amaxes_shared_between_two_passes(rows):
    """Once, whatever the rows, also where fc1's halves straddle register tiles."""
    test_shared_amax.test_norm((rows, 256), (True, True), "tensorwise")
    for width in (96, 128):
        test_shared_amax.test_swiglu((rows, width), (True, False), "tensorwise")
        test_shared_amax.test_swiglu_gradient((rows, width), (True, True), "tensorwise_e5m2")
    test_shared_amax.test_quantize((rows, 67), (True, True))
    test_shared_amax.test_there_must_be_something_to_share()


@pytest.mark.parametrize("shape", [(7, 160), (20, 128), (0, 128)], ids=str)
def test_producers_share_amaxes(shape, monkeypatch):
    for module in (activation, norm):
        monkeypatch.setattr(module, "fuses", lambda x, dtype, *wants: dtype == torch.bfloat16)
    for kind in ("norm", "swiglu", "swiglu, stored"):
        test_shared_amax.test_producers(shape, kind)


def test_one_scale_an_expert():
    """CASES 11, 12."""
    test_quantize_experts.test_rows_picked_by_an_index("tensorwise_e5m2", [128, 0, 128], holes)
    test_quantize_experts.test_no_rows_at_all()


@pytest.mark.slow
@pytest.mark.parametrize("given", [None, "amax", "scale"])
def test_rows_of_experts_as_they_lie(given):
    test_quantize_experts.test_rows_as_they_lie("tensorwise", given, torch.bfloat16)


@pytest.mark.parametrize("source", quick(["values", "bytes"], {"values"}))
def test_swiglu_of_experts_with_one_scale_each(source):
    test_quantize_experts.test_swiglu_and_its_gradient("tensorwise", source)


@pytest.mark.slow
def test_swiglu_from_and_to_bytes():
    test_quantize_producers.test_swiglu_of_bytes_is_that_of_their_values((20, 160), "mxfp8")
    test_quantize_producers.test_swiglu_keeps_its_input_as_bytes((20, 128), "blockwise")


@pytest.mark.parametrize(("shape", "name", "offset"), [((130, 512), "blockwise", 0.0), ((5, 712), "mxfp8", 1.0)])
def test_norm(shape, name, offset):
    test_quantize_fused.test_norm(shape, ONE_D[name], offset)


def test_norm_of_odd_inputs():
    test_quantize_fused.test_norm_of_nonfinite_rows_reaches_the_bytes()
    test_quantize_fused.test_norm_of_no_tokens_and_of_strided_rows()


@pytest.mark.parametrize(
    ("shape", "name"), quick([((128, 128), "blockwise"), ((7, 160), "mxfp8")], {((7, 160), "mxfp8")})
)
def test_swiglu_and_its_gradient(shape, name):
    test_quantize_fused.test_swiglu(shape, ONE_D[name])
    test_quantize_fused.test_swiglu_grad(shape, ONE_D[name])


def planted(change):
    """Emulates row+column quantization from PTX that `change` has changed; (got, expected)."""
    x = normal(128, 128)
    with testing.captured_launches() as launches:
        got = quantize.quantize(x, SPECS["blockwise"], True, True)
    ptx = testing.compile_launch(launches[0]).asm["ptx"]
    faulty = change(ptx)
    assert faulty != ptx
    testing.emulate(launches[0], faulty)
    return got, expected(x, SPECS["blockwise"])


def test_a_missing_barrier_is_found():
    with pytest.raises(AssertionError, match="race"):
        planted(lambda ptx: ptx.replace("bar.sync", "// bar.sync"))


def test_every_warp_that_touched_a_byte_counts():
    """Readers before the last one, and those of the same access; writers of the same access."""
    memory = SharedMemory(16, 1, np.arange(3))  # three warps of one thread
    byte = np.zeros((3, 1), int)

    def touch(*warps: int, writes: bool) -> None:
        memory.note(byte[: len(warps)], np.isin(memory.warps, warps), writes)

    touch(1, writes=False)
    touch(0, writes=False)
    with pytest.raises(AssertionError, match="after a read"):
        touch(0, writes=True)
    memory.epoch += 1  # a barrier
    touch(0, writes=True)
    touch(0, writes=False)
    memory.epoch += 1
    touch(0, 1, 2, writes=False)
    with pytest.raises(AssertionError, match="after a read"):
        touch(2, writes=True)
    memory.epoch += 1
    both = np.isin(memory.warps, (0, 1))
    memory.write(byte[:2], both, np.full((2, 1), 7, np.uint8))
    memory.epoch += 1
    with pytest.raises(AssertionError, match="several threads write"):
        memory.write(byte[:2], both, np.array([[7], [8]], np.uint8))


def test_a_wrong_instruction_is_found():
    cast = r"(cvt\.rn\.satfinite\.e4m3x2\.f32 lo, %r\d+, )(%r\d+)"
    got, want = planted(lambda ptx: re.sub(cast, r"\g<1>0f00000000", ptx))
    with pytest.raises(AssertionError, match="differ"):
        assert_same(got[0], want[0])


def test_a_store_out_of_bounds_is_found():
    with pytest.raises(AssertionError, match="out of bounds|misaligned"):
        planted(lambda ptx: re.sub(r"(st\.global\.v4\.b32 \[ %rd\d+ \+) 0", r"\g<1> 1048576", ptx))


def test_unknown_instructions_are_refused():
    with pytest.raises(NotImplementedError, match="min"):
        planted(lambda ptx: re.sub(r"\bmin\.[us]32", "min.f16", ptx))
