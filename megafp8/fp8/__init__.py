"""FP8 numerics: recipes, quantizers, storage, GEMMs and the linear layer."""

from megafp8.fp8.comm import CommPlan
from megafp8.fp8.convert import convert
from megafp8.fp8.delayed import DelayedScaling
from megafp8.fp8.input_spec import InputSpec
from megafp8.fp8.linear import Linear
from megafp8.fp8.param import Weight
from megafp8.fp8.policy import Policy
from megafp8.fp8.quantizer import Quantizer
from megafp8.fp8.recipe import Recipe, get_recipe
from megafp8.fp8.storage import Quantized, QuantizedStorage
from megafp8.fp8.tensor import QuantizedTensor

__all__ = [
    "CommPlan",
    "DelayedScaling",
    "InputSpec",
    "Linear",
    "Policy",
    "Quantized",
    "QuantizedStorage",
    "QuantizedTensor",
    "Quantizer",
    "Recipe",
    "Weight",
    "convert",
    "get_recipe",
]
