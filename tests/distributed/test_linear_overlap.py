"""Parallel linears compute while messages travel: the same numbers, and nothing held that is not read any more."""

from __future__ import annotations

import weakref
from unittest import mock

import pytest
import torch

from megafp8.config import Config
from megafp8.fp8 import CommPlan, gemm
from megafp8.parallel import Axis, build_parallel
from tests.cases import quick
from tests.distributed.layouts import distance
from tests.distributed.linears import (
    CASES,
    data,
    parallel_linear,
    parts_of,
    run,
)

OVERLAPPED = [case for case in CASES if case[2] != "blockwise fp32 scales"]


def overlap_is_quick(case: tuple) -> bool:
    kind, sp, recipe = case
    if sp:
        return kind == "column" or recipe in ("high precision", "blockwise")
    return recipe == "high precision" or (kind, recipe) in (("row", "tensorwise"), ("column", "mxfp8"))


@pytest.mark.parametrize(("kind", "sp", "recipe"), quick(OVERLAPPED, overlap_is_quick))
def test_overlap_changes_no_number(pool, kind, sp, recipe):
    for rows in (200, 6):
        plain, chunked = (pool.run_on(2, parallel_linear, kind, sp, recipe, rows, chunks) for chunks in (1, 4))
        for (a, *_), (b, *_) in zip(plain, chunked, strict=True):
            for x, y in zip(a, b, strict=True):
                # A CPU GEMM's own order of sums may depend on the number of rows: a BF16 rounding may flip.
                assert distance(x, y) <= (1e-4 if x.dtype == torch.bfloat16 else 1e-6)


def test_overlap_posts_before_it_waits(pool):
    """Column: chunk i + 1 travels while chunk i is multiplied; sums leave while the next chunk is multiplied."""
    for _, _, log in pool.run_on(2, parallel_linear, "column", True, "high precision", 256, 4):
        gathers = [e for e in log.events if "gather" in e]
        assert gathers[:4] == ["post gather 0", "post gather 1", "wait gather 0", "post gather 2"]
        assert gathers[4:8] == ["wait gather 1", "post gather 3", "wait gather 2", "wait gather 3"]
        backward = log.events[log.events.index("wait gather 3") + 1 :]
        assert backward[0] == "post gather 4"  # wgrad's operand travels during dgrad
        assert backward[1:5] == [f"post scatter_sum {i}" for i in range(4)]
        assert backward[5:7] == ["wait gather 4", "gradient of the weight"]
        assert backward[7:11] == [f"wait scatter_sum {i}" for i in range(4)]  # they travel during wgrad
    for _, _, log in pool.run_on(2, parallel_linear, "row", True, "high precision", 256, 4):
        assert log.events[:4] == [f"post scatter_sum {i}" for i in range(4)]
        backward = log.events[log.events.index("post gather 0") :]  # dY's pieces are under way before the first GEMM
        assert backward[:8] == [f"{what} gather {i}" for what in ("post", "wait") for i in range(4)]


def without_amaxes(events: list[str]) -> list[str]:
    return [event for event in events if "max" not in event]


@pytest.mark.parametrize("recipe", ["high precision", "tensorwise", "blockwise", "mxfp8"])
def test_backward_computes_while_messages_travel(pool, recipe):
    """Without chunks too: X travels during dgrad, the sum of dX during wgrad."""
    gemms = ([], []) if recipe == "high precision" else (["dgrad"], ["wgrad"])
    for sp, total in ((True, "scatter_sum 0"), (False, "sum 0")):
        travels, arrives = (["post gather 1"], ["wait gather 1"]) if sp else ([], [])
        dgrad, wgrad = gemms
        expected = [*travels, *dgrad, f"post {total}", *arrives, *wgrad, "gradient of the weight", f"wait {total}"]
        for _, _, log in pool.run_on(2, parallel_linear, "column", sp, recipe, 256):
            events = without_amaxes(log.events)
            start = events.index(expected[0])
            assert events[start : start + len(expected)] == expected


def left_at_wgrad(kind: str, sp: bool, recipe: str) -> tuple[bool, bool]:
    """Whether dgrad's operand, and what was gathered for wgrad before it was put in order, are there during wgrad."""
    size = torch.distributed.get_world_size()
    tp = build_parallel(Config().replace(world_size=size, tensor_model_parallel_size=size), "cpu").tp
    seen, gathered, found = [], [], []
    dgrad, wgrad, post_gathers = gemm.dgrad, gemm.wgrad, Axis.post_gathers

    def see(dy, *rest):
        seen.append(weakref.ref(dy.data))
        return dgrad(dy, *rest)

    def gather(axis, parts):
        outs, pending = post_gathers(axis, parts)
        gathered.append(weakref.ref(outs[0]))  # scales may be read as they came
        return outs, pending

    def look(*args):
        found.append(tuple(any(ref() is not None for ref in refs) for refs in (seen, gathered)))
        return wgrad(*args)

    with (
        mock.patch.object(gemm, "dgrad", see),
        mock.patch.object(gemm, "wgrad", look),
        mock.patch.object(Axis, "post_gathers", gather),
    ):
        run(CommPlan(tp, kind, sp), recipe, parts_of(kind, tp, sp, data(256)))
    return found[0]


@pytest.mark.parametrize(("kind", "sp"), [("column", True), ("column", False), ("row", True)])
def test_wgrad_finds_only_its_own_operands_in_memory(pool, kind, sp):
    for found in pool.run_on(2, left_at_wgrad, kind, sp, "blockwise"):
        assert found == (False, False)
