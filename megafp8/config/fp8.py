"""FP8: format, recipe, coverage, backend."""

from dataclasses import dataclass

from megafp8.config.flags import derived, flag


@dataclass(frozen=True)
class RecipeTraits:
    """What flags may say of a recipe; its numerics are in megafp8/fp8.

    Attributes:
        hybrid: takes e5m2, so --fp8-format hybrid.
        block: length of its scale tiles, whose shape can be chosen; None: one scale a tensor.
        power_of_two: whether scales can be rounded to powers of two or not (MXFP8's always are).
        history: takes scales from a history of amaxes.
    """

    hybrid: bool
    block: int | None
    power_of_two: bool
    history: bool

    @property
    def tiled(self) -> bool:
        return self.block is not None


RECIPES = {
    "tensorwise": RecipeTraits(hybrid=True, block=None, power_of_two=True, history=False),
    "blockwise": RecipeTraits(hybrid=True, block=128, power_of_two=True, history=False),
    "mxfp8": RecipeTraits(hybrid=False, block=32, power_of_two=False, history=False),
    "delayed": RecipeTraits(hybrid=True, block=None, power_of_two=True, history=True),
}
DEFAULT_RECIPE = {"e4m3": "blockwise", "hybrid": "tensorwise"}


@dataclass(frozen=True)
class FP8Config:
    """FP8 training; on when --fp8-format is given."""

    fp8_format: str | None = flag(
        None,
        "Turn FP8 on: e4m3 for all tensors, or hybrid (e4m3 forward, e5m2 gradients).",
        choices=("e4m3", "hybrid"),
    )
    fp8_recipe: str | None = flag(
        None,
        "How tensors are scaled: " + ", ".join(RECIPES) + ".",
        metavar="{" + ",".join(RECIPES) + "}",
        shown_default="blockwise for e4m3, tensorwise for hybrid",
    )
    fp8_margin: int = flag(0, "Delayed scaling: headroom in powers of two.")
    fp8_amax_history_len: int = flag(1, "Delayed scaling: steps of amax history kept.")
    fp8_amax_compute_algo: str = flag(
        "most_recent", "Delayed scaling: which amax of the history sets the scale.", choices=("most_recent", "max")
    )
    fp8_param_gather: bool = flag(
        False,
        "Keep weights in FP8 only, without a BF16 copy, and gather their bytes; needs --use-distributed-optimizer.",
    )
    first_last_layers_bf16: bool = flag(False, "Keep the first and last transformer layers in BF16.")
    num_layers_at_start_in_bf16: int = flag(1, "Layers kept in BF16 at the start; needs --first-last-layers-bf16.")
    num_layers_at_end_in_bf16: int = flag(1, "Layers kept in BF16 at the end; needs --first-last-layers-bf16.")
    keep_modules_in_bf16: tuple[str, ...] = flag(
        (),
        "Keep linears in BF16 whose name matches one of these patterns, e.g. 'layers.*.mlp.fc2'. A pattern that "
        "matches no module is an error.",
        nargs="+",
        metavar="PATTERN",
        shown_default="none",
    )
    fp8_module_recipes: tuple[str, ...] = flag(
        (),
        "Other recipes (tensorwise, tensorwise:hybrid, bf16) for some linears, e.g. '*.mlp.fc2=mxfp8', or @FILE with "
        "one a line. The last pattern that matches counts; one without a match is an error.",
        nargs="+",
        metavar="PATTERN=RECIPE",
        shown_default="none",
    )
    fp8_small_linears: str = flag(
        "bf16",
        "What becomes of linears that FP8 would slow down at their sizes, by the measurements in "
        "megafp8/fp8/crossover.json: they stay in BF16, or are FP8 all the same. --fp8-module-recipes comes first.",
        choices=("bf16", "fp8"),
    )
    small_linears_in_bf16: tuple[str, ...] = derived(())
    """Parts of a layer that are left out. Kept with a run, which resumes with them; empty in checkpoints of before."""
    fp8_power_of_two_scales: bool | None = flag(
        None, "Round scales down to powers of two.", shown_default="on for blockwise, off for tensorwise and delayed"
    )
    fp8_amax_epsilon: float = flag(0.0, "Lower bound of every amax before the scale is taken.")
    fp8_input_tile: str | None = flag(
        None, "Scale tile of inputs: 1d runs along the reduced dimension, 2d is square.",
        choices=("1d", "2d"), shown_default="the recipe's",
    )  # fmt: skip
    fp8_weight_tile: str | None = flag(
        None, "Scale tile of weights.", choices=("1d", "2d"), shown_default="the recipe's"
    )
    fp8_grad_tile: str | None = flag(
        None, "Scale tile of output gradients.", choices=("1d", "2d"), shown_default="the recipe's"
    )
    fp8_input_format: str | None = flag(
        None, "Number format of inputs.", choices=("e4m3", "e5m2"), shown_default="--fp8-format's"
    )
    fp8_weight_format: str | None = flag(
        None, "Number format of weights.", choices=("e4m3", "e5m2"), shown_default="--fp8-format's"
    )
    fp8_grad_format: str | None = flag(
        None, "Number format of output gradients.", choices=("e4m3", "e5m2"), shown_default="--fp8-format's"
    )
    activation_func_fp8_input_store: bool | None = flag(
        None,
        "Keep what activations read (fc1's output) in FP8 for backward, 1 x 128 tiles: half of the largest part of a "
        "layer's memory, for gradients that see its rounding. Works without --fp8-format too.",
        shown_default="on for experts in FP8, off elsewhere",
    )
    fp8_gemm_backend: str = flag(
        "auto",
        "Which FP8 GEMMs run: auto picks by a table of measured speed; triton takes the kernels of "
        "kernels/ (compute capability 9.0; 10.0 for mxfp8), cublaslt PyTorch's scaled_mm, reference plain PyTorch.",
        choices=("auto", "triton", "cublaslt", "reference"),
    )
    fp8_fast_accumulation: bool = flag(
        False,
        "Let tensor cores add up fprop's products alone, with about 13 bits: faster, and less accurate the longer the "
        "sums. For recipes with one scale a tensor; dgrad and wgrad stay accurate.",
    )
    fp8_monitor_interval: int = flag(
        0,
        "Write statistics of every quantized tensor (amax, scales, underflow, saturation, signal to noise) every so "
        "many iterations; 0 is off.",
    )
    fp8_fallback_after: int | None = flag(
        None,
        "Run a linear in BF16 from the step after this many non-finite steps were traced to it.",
        shown_default="never",
    )
    fp8_fallback_sqnr: float | None = flag(
        None,
        "Run a linear in BF16 when --fp8-monitor-interval finds the signal-to-noise ratio of one of its operands below "
        "so many dB (E4M3 has about 31, E5M2 25).",
        metavar="DB",
        shown_default="never",
    )
    fp8_fallback_for: int = flag(0, "Iterations for which a linear that fell back stays in BF16; 0: until the end.")
    fp8_forget_fallbacks: bool = flag(False, "On resume, run the linears that had fallen back to BF16 in FP8 again.")

    @property
    def enabled(self) -> bool:
        """Whether any linear runs in FP8."""
        return self.fp8_format is not None
