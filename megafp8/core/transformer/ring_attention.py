"""Ring attention (Liu et al. 2023): keys and values go from rank to rank, and attention is added up block by block.

Each rank starts with its own keys and values; n - 1 times all of them move one rank on, while the rank works on what it
has. Blocks are joined by the logarithms of their softmax sums (lse), as in FlashAttention:

    lse = logaddexp(lse_1, lse_2),    out = out_1 exp(lse_1 - lse) + out_2 exp(lse_2 - lse)

Backward goes around again, and the gradients of keys and values travel with them until they are home. The blocks are
plain formulas in FP32 on every device; what travels has the tensors' own dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megafp8.core.context_parallel import own_places
from megafp8.parallel import Axis


@dataclass(frozen=True)
class Visibility:
    """Which keys a query sees. length: of whole sequences; bounds: document bounds of them, or None; window: how many
    keys before its own, or None."""

    length: int
    bounds: Tensor | None
    window: int | None

    def mask(self, queries: Tensor, keys: Tensor, batch: int) -> Tensor:
        """bool [b or 1, 1, 1, queries, keys] for places in the sequence, int64."""
        distance = queries[:, None] - keys[None, :]
        seen = distance >= 0
        if self.window is not None:
            seen &= distance <= self.window
        if self.bounds is None:
            return seen[None, None, None]
        starts = torch.arange(batch, device=queries.device)[:, None] * self.length
        documents = [torch.bucketize(starts + places, self.bounds[1:].long(), right=True) for places in (queries, keys)]
        return (seen & (documents[0][:, :, None] == documents[1][:, None, :]))[:, None, None]


def ring_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, cp: Axis, seen: Visibility) -> Tensor:
    """q: [b, s / n, heads, d], k: [b, s / n, groups, d], v: [b, s / n, groups, c], of this rank's tokens.

    Returns [b, s / n, heads, c].
    """
    return _Ring.apply(q, k, v, scale, cp, seen)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, scale: float, cp: Axis, seen: Visibility) -> Tensor:
        ctx.scale, ctx.cp, ctx.seen = scale, cp, seen
        queries = _by_group(q, k.shape[2])
        out = torch.zeros(*queries.shape[:-1], v.shape[-1], device=q.device)
        lse = torch.full(queries.shape[:-1], -torch.inf, device=q.device)
        for block in _blocks(k, v, cp, seen):
            scores = _scores(queries, block, scale)
            part = scores.logsumexp(-1)
            joined = torch.logaddexp(lse, part)
            weights = (scores - _finite(joined)[..., None]).exp()
            out = out * (lse - _finite(joined)).exp()[..., None] + weights @ block.values
            lse = joined
        result = _by_token(out).to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse)
        return result

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        groups = k.shape[2]
        queries, dy = _by_group(q, groups), _by_group(grad_output, groups)
        delta = (dy * _by_group(out, groups)).sum(-1, keepdim=True)
        dq = torch.zeros_like(queries)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for block in _blocks(k, v, ctx.cp, ctx.seen):
            weights = (_scores(queries, block, ctx.scale) - _finite(lse)[..., None]).exp()
            ds = weights * (dy @ block.values.mT - delta) * ctx.scale
            dq += ds @ block.keys
            dk = dk + _by_token((ds.mT @ queries).sum(2, keepdim=True)).to(k.dtype)
            dv = dv + _by_token((weights.mT @ dy).sum(2, keepdim=True)).to(v.dtype)
            dk, dv = _arrived(_pass_on((dk, dv), ctx.cp))  # after the last block, home
        return _by_token(dq).to(q.dtype), dk, dv, None, None, None


@dataclass(frozen=True)
class _Block:
    """Keys and values of one rank, FP32 [b, groups, 1, tokens, channels], and who sees them."""

    keys: Tensor
    values: Tensor
    mask: Tensor


def _blocks(k: Tensor, v: Tensor, cp: Axis, seen: Visibility) -> Iterator[_Block]:
    """The keys and values of every rank, this one's first; the next ones travel meanwhile."""
    own = own_places(seen.length, cp, k.device)
    for turn in range(cp.size):
        moving = _pass_on((k, v), cp) if turn < cp.size - 1 else None
        source = Axis(cp.size, (cp.rank - turn) % cp.size)
        mask = seen.mask(own, own_places(seen.length, source, k.device), k.shape[0])
        yield _Block(_by_group(k, k.shape[2]), _by_group(v, v.shape[2]), mask)
        if moving is not None:
            k, v = _arrived(moving)


def _pass_on(tensors: tuple[Tensor, ...], cp: Axis):
    return [cp.post_shift(x.contiguous()) for x in tensors]


def _arrived(moving) -> list[Tensor]:
    for _, works in moving:
        for work in works:
            work.wait()
    return [x for x, _ in moving]


def _scores(queries: Tensor, block: _Block, scale: float) -> Tensor:
    """FP32 [b, groups, heads a group, queries, keys]; -inf where a key is not seen."""
    return (queries @ block.keys.mT * scale).masked_fill_(~block.mask, -torch.inf)


def _finite(lse: Tensor) -> Tensor:
    """0 for a query that has seen no key yet: exp(-inf - 0) is 0, where -inf minus itself would be NaN."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def _by_group(x: Tensor, groups: int) -> Tensor:
    """[b, tokens, heads, d] as FP32 [b, groups, heads a group, tokens, d]."""
    return x.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).float()


def _by_token(x: Tensor) -> Tensor:
    """[b, groups, heads a group, tokens, d] as [b, tokens, heads, d]."""
    return x.permute(0, 3, 1, 2, 4).flatten(2, 3)
