"""The row of each of a token's choices, when rows lie by expert and then by token: a counting sort in three launches.
And of rows that arrive by sender and expert, when they lie by expert and then by sender: one launch (`arrange_kernel`).

`count_kernel`   how many choices of each block go to each expert; marks all rows as nobody's
`prefix_kernel`  how many before each block
`place_kernel`   the rows, from where each expert begins (filled up to a multiple of the alignment)

Nothing waits for the device, and nothing is compared but numbers of experts: no order depends on the time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch

MOST_EXPERTS = 512
_MOST_ARRIVALS = 4096  # numbers of rows, by sender and expert, that a program adds up
_BLOCK, _CHUNK, _BLOCKS, _COLUMNS = 512, 32, 64, 8


class Placed(NamedTuple):
    """choices, tokens: int64 [total], of each row, -1 for nobody's; rows: int64 [N], of each choice; room: int64 [E],
    rows of each expert; ends: int32 [E], one past each one's last row."""

    choices: Tensor
    tokens: Tensor
    rows: Tensor
    room: Tensor
    ends: Tensor


@triton.jit
def _chosen(experts, first, N, CHUNK: tl.constexpr, EXPERTS: tl.constexpr):
    """int32 [CHUNK, EXPERTS]: 1 where a choice is of an expert."""
    choice = first + tl.arange(0, CHUNK)
    expert = tl.load(experts + choice, mask=choice < N, other=-1).to(tl.int32)
    return (expert[:, None] == tl.arange(0, EXPERTS)[None, :]).to(tl.int32)


@triton.jit
def count_kernel(experts, found, choices, tokens, N, total, share, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
                 EXPERTS: tl.constexpr):  # fmt: skip
    block = tl.program_id(0)
    count = tl.zeros([EXPERTS], dtype=tl.int32)
    for first in range(block * BLOCK, tl.minimum(block * BLOCK + BLOCK, N), CHUNK):
        count += tl.sum(_chosen(experts, first, N, CHUNK, EXPERTS), axis=0)
    tl.store(found + block * EXPERTS + tl.arange(0, EXPERTS), count)
    for first in range(block * share, tl.minimum(block * share + share, total), BLOCK):
        row = first + tl.arange(0, BLOCK)
        nobody = tl.full([BLOCK], -1, tl.int64)
        tl.store(choices + row, nobody, mask=row < total)
        tl.store(tokens + row, nobody, mask=row < total)


@triton.jit
def prefix_kernel(found, counts, blocks, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr, EXPERTS: tl.constexpr):
    """found[block, expert] = how many before the block; counts[expert] = how many in all."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    before = tl.zeros([COLUMNS], dtype=tl.int32)
    for first in range(0, blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        ptrs = found + block[:, None] * EXPERTS + column[None, :]
        inside = (block < blocks)[:, None] & (column < EXPERTS)[None, :]
        count = tl.load(ptrs, mask=inside, other=0)
        tl.store(ptrs, tl.cumsum(count, 0) - count + before[None, :], mask=inside)
        before += tl.sum(count, axis=0)
    tl.store(counts + column, before, mask=column < EXPERTS)


@triton.jit
def place_kernel(experts, before, counts, choices, tokens, rows, room_out, ends, N, E, topk, alignment,
                 BLOCK: tl.constexpr, CHUNK: tl.constexpr, EXPERTS: tl.constexpr):  # fmt: skip
    block = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    room = (tl.load(counts + expert) + alignment - 1) // alignment * alignment
    end = tl.cumsum(room, 0)
    if block == 0:
        tl.store(room_out + expert, room.to(tl.int64), mask=expert < E)
        tl.store(ends + expert, end, mask=expert < E)
    place = end - room + tl.load(before + block * EXPERTS + expert)
    for first in range(block * BLOCK, tl.minimum(block * BLOCK + BLOCK, N), CHUNK):
        chosen = _chosen(experts, first, N, CHUNK, EXPERTS)
        row = tl.sum(chosen * (tl.cumsum(chosen, 0) - 1 + place[None, :]), axis=1)
        choice = first + tl.arange(0, CHUNK)
        tl.store(rows + choice, row.to(tl.int64), mask=choice < N)
        tl.store(choices + row, choice.to(tl.int64), mask=choice < N)
        tl.store(tokens + row, (choice // topk).to(tl.int64), mask=choice < N)
        place += tl.sum(chosen, axis=0)


def place(experts: Tensor, num_experts: int, alignment: int, total: int) -> Placed:
    """experts: int64 [T, k], of each choice, all below num_experts (at most MOST_EXPERTS). alignment: each expert's
    rows are filled up to a multiple of it; total: rows in all, as many as that can need."""
    N, device = experts.numel(), experts.device
    choices, tokens = (torch.empty(total, dtype=torch.int64, device=device) for _ in range(2))
    rows, room = (torch.empty(n, dtype=torch.int64, device=device) for n in (N, num_experts))
    ends = torch.empty(num_experts, dtype=torch.int32, device=device)
    width, blocks = triton.next_power_of_2(num_experts), triton.cdiv(N, _BLOCK)
    found = torch.empty(blocks + 1, width, dtype=torch.int32, device=device)  # the last: of all blocks
    options = {"BLOCK": _BLOCK, "CHUNK": _CHUNK, "EXPERTS": width, "num_warps": 4 if width <= 128 else 8}
    flat = experts.reshape(-1)
    counts, facts = found[blocks], (N, num_experts, experts.shape[1], alignment, total)
    launch(count_kernel, facts, (flat, found, choices, tokens), lambda: (
        (blocks,),
        (flat, found, choices, tokens, N, total, triton.cdiv(total, blocks)),
        options,
    ))  # fmt: skip
    launch(prefix_kernel, facts, (found, counts), lambda: (
        (triton.cdiv(width, _COLUMNS),),
        (found, counts, blocks),
        {"BLOCKS": _BLOCKS, "COLUMNS": _COLUMNS, "EXPERTS": width, "num_warps": 4},
    ))  # fmt: skip
    launch(place_kernel, facts, (flat, found, counts, choices, tokens, rows, room, ends), lambda: (
        (blocks,),
        (flat, found, counts, choices, tokens, rows, room, ends, N, num_experts, experts.shape[1], alignment),
        options,
    ))  # fmt: skip
    return Placed(choices, tokens, rows, room, ends)


@triton.jit
def arrange_kernel(arriving, choices, rows, room_out, ends, senders, experts, alignment, BLOCK: tl.constexpr,
                   SENDERS: tl.constexpr, EXPERTS: tl.constexpr):  # fmt: skip
    """The rows of one sender for one expert: where they arrive, and where they go."""
    expert, sender = tl.program_id(0) % experts, tl.program_id(0) // experts
    e, s = tl.arange(0, EXPERTS), tl.arange(0, SENDERS)
    inside = (s < senders)[:, None] & (e < experts)[None, :]
    count = tl.load(arriving + s[:, None] * experts + e[None, :], mask=inside, other=0).to(tl.int32)
    of_expert = tl.sum(count, axis=0)
    room = (of_expert + alignment - 1) // alignment * alignment
    earlier = (s < sender)[:, None]
    same, here = (s == sender)[:, None], (e == expert)[None, :]
    first = tl.sum(tl.sum(tl.where(earlier | (same & (e < expert)[None, :]), count, 0), axis=0), axis=0)
    number = tl.sum(tl.sum(tl.where(same & here, count, 0), axis=0), axis=0)
    begin = tl.sum(tl.where(e < expert, room, 0), axis=0)
    target = begin + tl.sum(tl.sum(tl.where(earlier & here, count, 0), axis=0), axis=0)
    for start in range(0, number, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(rows + first + i, (target + i).to(tl.int64), mask=i < number)
        tl.store(choices + target + i, (first + i).to(tl.int64), mask=i < number)
    end = begin + tl.sum(tl.where(e == expert, room, 0), axis=0)
    if sender == senders - 1:  # what fills the expert up
        for start in range(target + number, end, BLOCK):
            i = start + tl.arange(0, BLOCK)
            tl.store(choices + i, tl.full([BLOCK], -1, tl.int64), mask=i < end)
        tl.store(ends + expert, end)
        tl.store(room_out + expert, (end - begin).to(tl.int64))


def arranges(arriving: Tensor) -> bool:
    """Whether `arrange` takes so many senders and experts."""
    senders, experts = (triton.next_power_of_2(n) for n in arriving.shape)
    return senders * experts <= _MOST_ARRIVALS


def arrange(arriving: Tensor, alignment: int, count: int, total: int) -> Placed:
    """arriving: int64 [senders, E], contiguous, rows that arrive, by sender and expert; count: all of them. alignment:
    each expert's rows are filled up to a multiple of it; total: all rows then. Here a row is its own choice, and its
    own token."""
    (senders, experts), device = arriving.shape, arriving.device
    choices, rows, room = (torch.empty(n, dtype=torch.int64, device=device) for n in (total, count, experts))
    ends = torch.empty(experts, dtype=torch.int32, device=device)
    widths = {"SENDERS": triton.next_power_of_2(senders), "EXPERTS": triton.next_power_of_2(experts)}
    launch(arrange_kernel, (senders, experts, alignment), (arriving, choices, rows, room, ends), lambda: (
        (experts * senders,),
        (arriving, choices, rows, room, ends, senders, experts, alignment),
        {"BLOCK": _BLOCK, **widths, "num_warps": 4},
    ))  # fmt: skip
    return Placed(choices, choices, rows, room, ends)
