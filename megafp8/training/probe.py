"""The probe's measurements: a trained model in high precision, of which some linears compute as a recipe would.

`Emulated` linears quantize the operands of the roles asked for, in the orientations that the three GEMMs read, and
multiply in FP32: what FP8 GEMMs give, but for the order of additions. So each role can be looked at alone.

What is changed alone is a unit: a linear, or all experts' fc1 or fc2 of a layer, which run one after the other here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megafp8.core.moe.experts import Experts
from megafp8.data import Batch
from megafp8.fp8 import Linear, Recipe
from megafp8.fp8.recipe import ROLES
from megafp8.step import Phase, StepContext
from megafp8.training.fallback import group_of
from megafp8.training.step import run_stage

STEP = StepContext(phase=Phase.EVAL)


class Emulated(torch.autograd.Function):
    """y = x W^T + b with some operands quantized. x: [M, K]; roles: of input, weight, grad_output."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, roles: Collection[str]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe, ctx.roles, ctx.biased = recipe, roles, bias is not None
        y = quantized(x, recipe, "input", roles) @ quantized(weight, recipe, "weight", roles).t()
        return (y if bias is None else y + bias.float()).to(x.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), recipe, roles = ctx.saved_tensors, ctx.recipe, ctx.roles
        dx = quantized(dy, recipe, "grad_output", roles) @ quantized(weight, recipe, "weight", roles, colwise=True)
        dy_col = quantized(dy, recipe, "grad_output", roles, colwise=True)
        dw = dy_col.t() @ quantized(x, recipe, "input", roles, colwise=True)
        db = dy.sum(0, dtype=torch.float32).to(dy.dtype) if ctx.biased else None
        return dx.to(x.dtype), dw.to(weight.dtype), db, None, None


def quantized(x: Tensor, recipe: Recipe, role: str, roles: Collection[str], *, colwise: bool = False) -> Tensor:
    """`x` in FP32 as the GEMMs see it: through FP8 and back, if its role is one of `roles`."""
    if role not in roles or not x.numel():  # an expert may have no rows
        return x.float()
    return recipe.quantizer(role).quantize(x.detach(), not colwise, colwise).dequantize(torch.float32)


@dataclass(frozen=True)
class Effect:
    """What a change of precision does.

    loss: of the model, nats a token. output_error: of the unit, ||y' - y|| / ||y||; None for several units.
    cosine: of all parameters' gradients with those in high precision; None: not asked for.
    """

    loss: float
    output_error: float | None = None
    cosine: float | None = None


class Probe:
    """A model and the batches it is measured on. All of its linears are set to high precision.

    units: name -> names of its linears. A unit that is not in `called` did not compute.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Batch], recipes: Collection[Recipe]) -> None:
        self.model, self.batches = model, list(batches)
        self.linears: dict[str, Linear] = {}
        for module in model.modules():
            if isinstance(module, Experts):
                module.apart = True
            if isinstance(module, Linear) and module.name is not None:
                module.use_recipe(None)
                if any(recipe.covers(module.name) for recipe in recipes):
                    self.linears[module.name] = module
        self.units: dict[str, list[str]] = {}
        for name, linear in self.linears.items():
            self.units.setdefault(group_of(linear), []).append(name)
        seen = self._called()
        self.called = {unit for unit, names in self.units.items() if seen & set(names)}
        self._params = [param for param in model.parameters() if param.requires_grad]
        self._gradient: Tensor | None = None
        self.base = self.measure({}, None, with_cosine=False)

    def _called(self) -> set[str]:
        """The linears that compute when the model does."""
        seen: set[str] = set()
        handles = [m.register_forward_hook(lambda m, a, y, n=n: seen.add(n)) for n, m in self.linears.items()]
        self._loss(self.batches[:1])
        for handle in handles:
            handle.remove()
        return seen

    def inputs(self, rows: int = 512) -> dict[str, Tensor]:
        """Linear -> the first rows of its input, in the compute dtype."""
        found: dict[str, Tensor] = {}

        def keep(name: str):
            def hook(module: nn.Module, args: tuple, y: Tensor) -> None:
                found.setdefault(name, args[0].detach().reshape(-1, module.in_features)[:rows].clone())

            return hook

        handles = [m.register_forward_hook(keep(n)) for n, m in self.linears.items()]
        with torch.no_grad():
            self._loss(self.batches[:1])
        for handle in handles:
            handle.remove()
        return found

    def measure(
        self, changed: Mapping[str, Recipe], roles: Collection[str] | None = None, *, with_cosine: bool = True
    ) -> Effect:
        """changed: unit -> recipe it computes with. roles: that are quantized; None: all."""
        errors: list[Tensor] = []
        linears = {name: recipe for unit, recipe in changed.items() for name in self.units[unit]}
        with self._changed(linears, ROLES if roles is None else roles, errors if len(changed) == 1 else None):
            if not with_cosine:
                with torch.no_grad():
                    loss = self._loss(self.batches)
                return Effect(loss, self._error(errors))
            loss, gradient = self._loss_and_gradient()
        return Effect(loss, self._error(errors), cosine_of(gradient, self.gradient))

    def covers(self, recipe: Recipe, unit: str) -> bool:
        return recipe.covers(self.units[unit][0])

    def pattern(self, unit: str) -> str:
        """What flags call a unit."""
        holder, _, kind = unit.rpartition(".")
        return unit if unit in self.linears else f"{holder}.*.{kind}"

    @property
    def gradient(self) -> Tensor:
        """That of all parameters in high precision, FP32, flat."""
        if self._gradient is None:
            self._gradient = self._loss_and_gradient()[1]
        return self._gradient

    @contextmanager
    def _changed(
        self, changed: Mapping[str, Recipe], roles: Collection[str], errors: list[Tensor] | None
    ) -> Iterator[None]:
        for name, recipe in changed.items():
            self.linears[name].forward = self._forward(self.linears[name], recipe, roles, errors)
        try:
            yield
        finally:
            for name in changed:
                del self.linears[name].forward

    @staticmethod
    def _forward(linear: Linear, recipe: Recipe, roles: Collection[str], errors: list[Tensor] | None):
        def forward(x: Tensor, step: StepContext | None = None, **rest) -> Tensor:
            flat = x.reshape(-1, linear.in_features)
            y = Emulated.apply(flat, linear.weight, linear.bias, recipe, roles)
            if errors is not None:
                with torch.no_grad():
                    operands = ((flat, "input"), (linear.weight, "weight"))
                    found, exact = (
                        a @ b.t()
                        for a, b in (
                            [quantized(t, recipe, role, roles) for t, role in operands],
                            [t.float() for t, _ in operands],
                        )
                    )
                    errors.append(torch.stack([(found - exact).double().square().sum(), exact.double().square().sum()]))
            return y.view(*x.shape[:-1], y.shape[-1])

        return forward

    @staticmethod
    def _error(errors: list[Tensor]) -> float | None:
        if not errors:
            return None
        noise, signal = torch.stack(errors).sum(0).tolist()
        return (noise / signal) ** 0.5 if signal else None

    def _loss(self, batches: Sequence[Batch]) -> float:
        step, total, tokens = STEP, 0.0, 0.0
        for batch in batches:
            total += run_stage(self.model, batch, step).item()
            tokens += batch.loss_mask.sum().item()
        return total / tokens

    def _loss_and_gradient(self) -> tuple[float, Tensor]:
        for param in self._params:
            param.grad = None
        total, tokens, step = 0.0, 0.0, STEP
        for batch in self.batches:
            loss = run_stage(self.model, batch, step)
            loss.backward()
            total, tokens = total + loss.item(), tokens + batch.loss_mask.sum().item()
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._params]
        gradient = torch.cat([part.flatten().float() for part in parts])
        for param in self._params:
            param.grad = None
        return total / tokens, gradient


def cosine_of(a: Tensor, b: Tensor) -> float:
    """Cosine of two vectors; sums in FP64."""
    dot, aa, bb = ((x.double() * y.double()).sum() for x, y in ((a, b), (a, a), (b, b)))
    return (dot / (aa * bb).sqrt()).item()


def keep_within(
    probe: Probe, recipe: Recipe, ranking: Sequence[str], budget: float, out: Collection[str] = ()
) -> tuple[list[str], float]:
    """The fewest of the units, in the order of `ranking`, that have to stay in BF16 for the whole model's loss to be
    within `budget` (relative) of high precision; and the gap that is left. out: of units that stay there anyway."""
    kept: list[str] = []
    for name in (None, *(unit for unit in ranking if unit not in out)):
        kept += [] if name is None else [name]
        changed = {unit: recipe for unit in probe.units if unit not in (*kept, *out) and probe.covers(recipe, unit)}
        gap = probe.measure(changed, with_cosine=False).loss / probe.base.loss - 1
        if abs(gap) <= budget:
            break
    return kept, gap


@torch.no_grad()
def outlier_error(x: Tensor, weight: Tensor, recipe: Recipe, factor: float) -> float:
    """Error of `x W^T` when channel 0 of `x` is `factor` times as large, relative to what the other channels add up to:
    ||y' - y|| / ||y without channel 0||. High where the outlier's scale drowns its neighbours."""
    spoilt = x.clone()
    spoilt[:, 0] *= factor
    exact = spoilt.float() @ weight.float().t()
    rest = spoilt[:, 1:].float() @ weight[:, 1:].float().t()
    operands = [quantized(t, recipe, role, ROLES) for t, role in ((spoilt, "input"), (weight, "weight"))]
    # Channel 0 itself keeps its relative error under any scale; what matters is what becomes of the others.
    lost = (operands[0][:, 1:] @ operands[1][:, 1:].t() - rest).double().norm()
    return (lost / rest.double().norm()).item() if exact.numel() else 0.0
