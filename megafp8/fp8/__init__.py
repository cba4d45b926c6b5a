"""FP8 numerics: recipes, quantizers, storage, GEMMs and the linear layer."""

from megafp8.fp8.quantizer import Quantizer
from megafp8.fp8.recipe import Recipe, get_recipe
from megafp8.fp8.storage import Quantized, QuantizedStorage

__all__ = ["Quantized", "QuantizedStorage", "Quantizer", "Recipe", "get_recipe"]
