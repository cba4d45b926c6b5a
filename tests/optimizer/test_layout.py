"""Layout of the flat buffers, their buckets and shards."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megafp8.optimizer.buffers import launch_order
from megafp8.optimizer.layout import ALIGNMENT, Entry, Group, Piece, Shard, piece_boxes, plan_layouts
from megafp8.params import Init, ParamSpec, range_boxes

ENTRIES = st.lists(
    st.tuples(
        st.integers(0, 1000),
        st.sampled_from([torch.bfloat16, torch.float32, torch.float8_e4m3fn]),
        st.booleans(),
        st.booleans(),
        st.booleans(),
        st.booleans(),
        st.integers(0, 30),
    ),
    min_size=1,
    max_size=20,
).map(lambda rows: [Entry(f"p{i}", n, t, e, Group(d, u), p, o) for i, (n, t, e, d, u, p, o) in enumerate(rows)])
OPTIONS = st.fixed_dictionaries(
    {
        "shards": st.integers(1, 5),
        "expert_shards": st.integers(1, 3),
        "bucket_elements": st.none() | st.integers(1, 2000),
    }
)


@settings(deadline=None)
@given(ENTRIES, OPTIONS)
def test_layout_places_every_parameter_once_without_overlap(entries, options):
    layouts = plan_layouts(entries, **options)
    by_name = {e.name: e for e in entries}
    assert len({(lay.dtype, lay.expert, lay.partial) for lay in layouts}) == len(layouts)
    assert sorted(s.name for lay in layouts for s in lay.slots) == sorted(by_name)
    for layout in layouts:
        end = 0
        for slot in layout.slots:
            entry = by_name[slot.name]
            assert (entry.dtype, entry.expert, entry.partial) == (layout.dtype, layout.expert, layout.partial)
            assert slot.start % ALIGNMENT == 0
            assert slot.start >= end
            assert slot.stop - slot.start == entry.numel
            end = slot.stop
        assert end <= layout.numel


@settings(deadline=None)
@given(ENTRIES, OPTIONS)
def test_segments_cover_the_buffer_and_hold_one_group(entries, options):
    groups = {e.name: e.group for e in entries}
    for layout in plan_layouts(entries, **options):
        assert layout.segments[0].start == 0
        assert layout.segments[-1].stop == layout.numel
        for a, b in zip(layout.segments, layout.segments[1:], strict=False):
            assert a.stop == b.start
        for slot in layout.slots:
            homes = [s for s in layout.segments if s.start <= slot.start and slot.stop <= s.stop]
            assert any(s.group == groups[slot.name] for s in homes)


@settings(deadline=None)
@given(ENTRIES, OPTIONS)
def test_buckets_cover_the_buffer_in_the_order_of_readiness(entries, options):
    order = {e.name: e.order for e in entries}
    for layout in plan_layouts(entries, **options):
        assert [b.start for b in layout.buckets] == [0, *(b.stop for b in layout.buckets[:-1])]
        assert layout.buckets[-1].stop == layout.numel
        for bucket in layout.buckets:
            assert (bucket.stop - bucket.start) % (layout.shards * ALIGNMENT) == 0
        for a, b in zip(layout.buckets, layout.buckets[1:], strict=False):
            assert a.order <= b.order
            early = [order[s.name] for s in layout.slots if a.start <= s.start < s.stop <= a.stop]
            late = [order[s.name] for s in layout.slots if b.start <= s.start < s.stop <= b.stop]
            assert not early or not late or max(early) <= min(late)
    queue = launch_order(plan_layouts(entries, **options))
    assert len(queue) == len(set(queue))


@settings(deadline=None)
@given(ENTRIES, OPTIONS, st.randoms())
def test_layout_is_independent_of_the_order_of_parameters(entries, options, random):
    shuffled = list(entries)
    random.shuffle(shuffled)
    assert plan_layouts(entries, **options) == plan_layouts(shuffled, **options)


@settings(deadline=None)
@given(ENTRIES, OPTIONS)
def test_shards_hold_every_element_once(entries, options):
    for layout in plan_layouts(entries, **options):
        shards = [Shard(layout, rank) for rank in range(layout.shards)]
        seen = torch.zeros(layout.numel, dtype=torch.int32)
        params = {s.name: torch.zeros(s.stop - s.start, dtype=torch.int32) for s in layout.slots}
        assert len({shard.numel for shard in shards}) == 1
        for shard in shards:
            own = torch.zeros(shard.numel, dtype=torch.int32)
            for part in shard.parts(seen):
                part += 1
            for run in shard.runs:
                own[run.local : run.local + run.stop - run.start] += 1
                assert any(
                    s.group == run.group and s.start <= run.start and run.stop <= s.stop for s in layout.segments
                )
            assert (own == 1).all()
            for piece in shard.pieces:
                params[piece.name][piece.start : piece.stop] += 1
                assert piece.start % ALIGNMENT == piece.local % ALIGNMENT == 0
        assert (seen == 1).all()
        assert all((param == 1).all() for param in params.values())


@settings(deadline=None)
@given(st.lists(st.integers(0, 7), max_size=4).map(tuple), st.data())
def test_a_range_of_a_tensor_is_a_few_boxes(shape, data):
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    numbers = torch.arange(numel).view(shape)
    boxes = range_boxes(start, stop, shape)
    found = [numbers[tuple(slice(a, b) for a, b in box)].reshape(-1) for box in boxes]
    assert torch.equal(torch.cat(found) if found else torch.arange(0), torch.arange(start, stop))
    assert all(part.numel() for part in found)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize("start", [0, 64, 128])
def test_boxes_of_a_piece_are_global_and_leave_padding_out(start):
    """A tensor-parallel part of an embedding, rows 10 to 15 of it padding."""
    spec = ParamSpec("w", (30, 20), Init("zeros"), True, box=((20, 30), (0, 20)), local_shape=(15, 20))
    boxes = piece_boxes(Piece("w", start, 300, 1000), spec)
    assert sum((b[0][1] - b[0][0]) * (b[1][1] - b[1][0]) for b, _ in boxes) == 200 - start
    assert boxes[0][1].start == 1000
    assert boxes[0][0][0][0] == 20 + start // 20
    assert boxes[-1][0][0][1] == 30


@pytest.mark.parametrize("bucket_elements", [None, 100])
@pytest.mark.parametrize("shards", [1, 3])
def test_stacks_lie_side_by_side_in_one_bucket(shards, bucket_elements):
    """At one distance, by number, whatever lies between them in the model; they get ready when the last one does."""
    entries = [Entry(f"norm{i}", 70, torch.float32, False, Group(False), order=i) for i in range(30)]
    for number in range(11):  # "10" sorts before "2"
        for kind, size in (("fc1", 130), ("fc2", 65)):
            order = 40 - 2 * number - (kind == "fc2")
            entry = Entry(f"{number}.{kind}", size, torch.float32, False, Group(True), order=order)
            entries.append(replace(entry, stack=kind, number=number))
    (layout,) = plan_layouts(entries, shards=shards, bucket_elements=bucket_elements)
    slots = {slot.name: slot for slot in layout.slots}
    for kind, size in (("fc1", 192), ("fc2", 128)):
        starts = [slots[f"{number}.{kind}"].start for number in range(11)]
        assert starts == [starts[0] + number * size for number in range(11)]
        inside = [b for b in layout.buckets if b.start <= starts[0] < b.stop]
        assert len(inside) == 1
        assert inside[0].stop >= slots[f"10.{kind}"].stop
        assert inside[0].order >= max(e.order for e in entries if e.stack == kind)
