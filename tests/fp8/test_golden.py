"""Golden vectors of tests/golden, made with independent implementations, byte for byte."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megafp8.fp8 import get_recipe

GOLDEN = Path(__file__).parents[1] / "golden"
FILES = sorted(p.stem for p in GOLDEN.glob("*.safetensors"))

# Name of a vector -> the quantizer that must make it.
QUANTIZERS = {
    "blockwise_e4m3_pow2_1d": get_recipe("blockwise").quantizer("input"),
    "blockwise_e4m3_pow2_2d": get_recipe("blockwise").quantizer("weight"),
    "blockwise_e4m3_fp32_1d": get_recipe("blockwise", power_of_two_scales=False).quantizer("input"),
    "blockwise_e4m3_fp32_2d": get_recipe("blockwise", power_of_two_scales=False).quantizer("weight"),
    "blockwise_e5m2_pow2_1d": get_recipe("blockwise", fp8_format="hybrid").quantizer("grad_output"),
    "tensorwise_e4m3_fp32": get_recipe("tensorwise").quantizer("input"),
    "tensorwise_e4m3_pow2": get_recipe("tensorwise", power_of_two_scales=True).quantizer("input"),
    "tensorwise_e5m2_fp32": get_recipe("tensorwise").quantizer("grad_output"),
    "mxfp8_1d": get_recipe("mxfp8").quantizer("input"),
    "mxfp8_2d": get_recipe("mxfp8").quantizer("weight"),
}


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.element_size() == 1 else tensor.contiguous()


def test_all_five_files_are_here():
    assert len(FILES) == 5


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_bytes_and_scales(file, name):
    vectors = load_file(GOLDEN / f"{file}.safetensors")
    quantized = QUANTIZERS[name].quantize(vectors["input"], rowwise=True, colwise=True)
    checked = 0
    for key, expected in vectors.items():
        if key == "input" or key.partition(".")[0] != name:
            continue
        *orientation, part = key.split(".")[1:]
        storage = getattr(quantized, orientation[0] if orientation else "rowwise")
        got = raw(getattr(storage, part))
        assert got.shape == expected.shape, key
        assert torch.equal(got, expected), key
        checked += 1
    assert checked >= 2


@pytest.mark.parametrize("file", FILES)
def test_every_vector_has_a_quantizer(file):
    assert {key.partition(".")[0] for key in load_file(GOLDEN / f"{file}.safetensors")} == {"input", *QUANTIZERS}
