"""Weight: owns the stored bytes of a linear's weight, the FP8 copies derived from them, and their version.

Writers (optimizer, load, fallback) call `write_shard()` and then `publish()`, which drops every derived copy at once,
so no path leaves one orientation new and the other stale. (Where CUDA graphs read copies, `stay` lets each new one be
written where the one before lay.) Code that knows nothing of this class writes the parameter
in place: PyTorch counts that in the parameter's version, which is compared too, except for fused optimizers, whose
steps are announced by a hook. Only a write through `param.data` escapes all of this: call `publish()` after it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from megafp8.fp8 import gemm
from megafp8.fp8.comm import ALONE, CommPlan
from megafp8.fp8.primary import PrimaryBytes
from megafp8.fp8.recipe import Recipe
from megafp8.fp8.storage import Quantized, QuantizedStorage
from megafp8.parallel import Axis, Pending


class Weight:
    """The weight `param [N, K]` of a linear under `recipe`.

    keep_transposed: keep a dgrad copy that is a mere transposition until the next version, instead of making it anew
        in each backward: memory for time.
    comm: how the weight lies over ranks: those that hold its parts share the scales of what they share.
    history_name: under which a history has its scale, where the recipe uses one.
    version: counts what was published.
    arrival: what to wait for before the stored bytes may be read; None: nothing.
    primary: the FP8 bytes that the weight consists of, if it is an FP8 primary weight (`hold_fp8_only`).
    """

    arrival: Pending | None = None
    primary: PrimaryBytes | None = None

    def __init__(
        self,
        param: nn.Parameter,
        recipe: Recipe | None,
        *,
        keep_transposed: bool = True,
        comm: CommPlan = ALONE,
        history_name: str | None = None,
    ):
        self.param = param
        self.recipe = recipe
        self.keep_transposed = keep_transposed
        self.history_name = history_name
        self.shared = comm.axis if comm.cut("weight") else Axis()
        self.grid, self.grid_dim = comm.grid, 0 if comm.kind == "column" else 1
        self.version = 0
        self._key: tuple | None = None
        self._copies: dict[str, QuantizedStorage] = {}
        self._amax: Tensor | None = None
        self._needs: tuple[torch.device, dict[str, str]] | None = None
        self._places: dict[str, QuantizedStorage | Tensor] | None = None

    def __getstate__(self) -> dict:
        """Copies (deepcopy, pickle) of a module own their parameter anew, see `Linear`; they inherit nothing."""
        return {"param": None, "recipe": self.recipe}

    @torch.no_grad()
    def write_shard(self, value: Tensor) -> None:
        """Overwrites the stored bytes with `value` (local shape, any float dtype), rounded to the weight's dtype."""
        assert self.primary is None, "an FP8 primary weight is written by its optimizer, from all ranks' masters"
        self.param.copy_(value)

    @torch.no_grad()
    def hold_fp8_only(self, primary: PrimaryBytes) -> None:
        """Makes it an FP8 primary weight: `param` keeps its shape and dtype, but is one NaN, expanded, from now on.

        So whoever should still read its values sees NaN, and a write to it is an error.
        Raises ValueError where ranks share tiles of the weight.
        """
        if self.grid is not None:
            raise ValueError(
                f"--fp8-param-gather: tensor parallelism cuts the weight {tuple(self.param.shape)} through its tiles; "
                "use another --tensor-model-parallel-size, --fp8-recipe tensorwise, or leave --fp8-param-gather out"
            )
        self.primary = primary
        self.param.data = self.param.new_full((), torch.nan).expand(self.param.shape)

    def publish(self) -> None:
        """Announces that the stored bytes changed: every derived copy is dropped."""
        self.version += 1
        self._drop()

    def stay(self) -> None:
        """From now on each copy, and the amax, is written where the first one lies: CUDA graphs read them there."""
        self.keep_transposed = True
        if self._places is None:
            self._places = dict(self._copies) | ({} if self._amax is None else {"amax": self._amax})

    @torch.no_grad()
    def _placed(self, what: str, made: QuantizedStorage | Tensor) -> QuantizedStorage | Tensor:
        """`made`, where copies stay as the tensors that were there first. what: an orientation, or "amax"."""
        place = made if self._places is None else self._places.setdefault(what, made)
        if place is not made:
            pairs = [(place, made)] if what == "amax" else [(place.data, made.data), (place.scale_inv, made.scale_inv)]
            for old, new in pairs:
                if old.data_ptr() != new.data_ptr():
                    _bytes(old).copy_(_bytes(new))
        return place

    def _drop(self) -> None:
        self._key, self._copies, self._amax = None, {}, None

    def _refresh(self, scale: Tensor | None) -> None:
        """Drops the copies of another version, another parameter or another (delayed) scale.

        What is read comes after this, so this is where weights that are on their way are waited for.
        """
        if self.arrival is not None:
            self.arrival.wait()
            self.arrival = None
        key = (self.version, self.param._version, self.param.data_ptr(), scale)
        unchanged = self._key is not None and self._key[:3] == key[:3] and self._key[3] is key[3]
        if not unchanged:
            self._drop()
            self._key = key

    def version_key(self) -> tuple:
        """What changes whenever the stored bytes do. Waits for those that are on their way."""
        self._refresh(None)
        return self._key[:3]

    def amax(self, scale: Tensor | None = None) -> Tensor:
        """The weight's amax (tensor tiles), once a version.

        Of all ranks that share the weight, unless a history gives the `scale`: that reduces its amaxes itself.
        """
        self._refresh(scale)
        if self.primary is not None and self._places is None:
            return self.primary.amax
        if self._amax is None:
            self._amax = self._placed("amax", self._measure(scale))
        return self._amax

    def _measure(self, scale: Tensor | None) -> Tensor:
        if self.primary is not None:
            return self.primary.amax
        amax = self.recipe.quantizer("weight").amax(self.param)
        return amax if scale is not None else self.shared.max_(amax)

    def operand(self, gemm_name: str, scale: Tensor | None = None, *, all_copies: bool = False) -> QuantizedStorage:
        """The FP8 operand of "fprop" or "dgrad", derived at most once a version.

        scale: delayed scaling's; None takes it from the weight's amax. all_copies: the other GEMM will ask as well, so
        that one pass over the weight should make both, where both are kept.
        """
        self._refresh(scale)
        device = self.param.device
        if self._needs is None or self._needs[0] != device:
            self._needs = device, gemm.needs(self.recipe, "weight", device)
        needs = self._needs[1]
        orientation = needs[gemm_name]
        if orientation in self._copies:
            return self._copies[orientation]
        if all_copies and self.keep_transposed and self.primary is None and not self._copies:
            made = self._quantize(scale, rowwise="rowwise" in needs.values(), colwise="colwise" in needs.values())
            self._copies = {o: self._placed(o, getattr(made, o)) for o in sorted(set(needs.values()), reverse=True)}
            return self._copies[orientation]
        storage = self._derive(orientation, scale)
        is_transposition = orientation == "colwise" and storage.tile.symmetric
        if self.keep_transposed or not is_transposition:
            storage = self._copies[orientation] = self._placed(orientation, storage)
        return storage

    @torch.no_grad()
    def derive(self, scale: Tensor | None = None) -> None:
        """Makes what a forward and backward ask for and is kept, if it is not there already. scale: as `operand`'s."""
        self.operand("fprop", scale, all_copies=True)
        if self.keep_transposed:
            self.operand("dgrad", scale)
        if self.history_name is not None:
            self.amax(scale)

    def _derive(self, orientation: str, scale: Tensor | None) -> QuantizedStorage:
        if self.primary is not None:
            if scale is not self.primary.scale:
                raise RuntimeError(
                    "an FP8 primary weight has another scale than its history: Optimizer.write_weights()"
                )
            return self.primary.storage(orientation)
        other = self._copies.get("rowwise" if orientation == "colwise" else "colwise")
        if other is not None and other.tile.symmetric:
            return other.flipped()
        quantized = self._quantize(scale, rowwise=orientation == "rowwise", colwise=orientation == "colwise")
        return getattr(quantized, orientation)

    def _quantize(self, scale: Tensor | None, *, rowwise: bool, colwise: bool) -> Quantized:
        quantizer = self.recipe.quantizer("weight")
        value, amax = self.param, None
        if self.grid is not None:
            value = self.grid.pad(value, self.grid_dim)
            amax = self.grid.share(quantizer.amax(value), self.grid_dim)
        elif scale is None and quantizer.spec.tile.kind == "tensor" and self.shared.size > 1:
            amax = self.amax()
        return quantizer.quantize(value, rowwise, colwise, amax=amax, scale=scale, out=self._place_of(rowwise, colwise))

    def _place_of(self, rowwise: bool, colwise: bool) -> Quantized | None:
        """Where copies that stay are written over."""
        wanted = [(o, on) for o, on in (("rowwise", rowwise), ("colwise", colwise)) if on]
        if self._places is None or not all(o in self._places for o, _ in wanted):
            return None
        return Quantized(**{o: self._places[o] for o, _ in wanted})

    @property
    def nbytes(self) -> int:
        """Bytes of the derived copies held now."""
        own = {id(copy) for o, copy in self._copies.items() if self.primary is not None and o == "rowwise"}
        return sum(copy.nbytes for copy in self._copies.values() if id(copy) not in own)


def _bytes(x: Tensor) -> Tensor:
    """A tensor that any backend copies: 8-bit floats as their bytes."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def _publish_after_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    """`torch.optim`'s fused kernels write parameters without counting it in their version."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            owner = getattr(param, "owner", None)
            if isinstance(owner, Weight):
                owner.publish()


register_optimizer_step_post_hook(_publish_after_step)


@torch.no_grad()
def share_amaxes(weights: Iterable[Weight]) -> None:
    """Takes the amaxes of all weights that have one scale over several ranks, in one max all-reduce an axis.

    Call it after `publish()`, on all those ranks; without it each weight's is reduced when it is first asked for.
    """
    shared = [w for w in weights if w.shared.size > 1 and w.recipe is not None and not w.recipe.uses_history]
    shared = [w for w in shared if w.primary is None and w.recipe.quantizer("weight").spec.tile.kind == "tensor"]
    if not shared:
        return
    for weight in shared:
        weight._refresh(None)
    for axis in dict.fromkeys(weight.shared for weight in shared):  # the experts' may be other ranks
        members = [weight for weight in shared if weight.shared == axis]
        packed = axis.max_(torch.cat([w.recipe.quantizer("weight").amax(w.param) for w in members]))
        for weight, amax in zip(members, packed.split(1), strict=True):
            weight._amax = amax
