"""What held the peak: the allocator's history by hand."""

from megafp8.plan.at_peak import NO_LINE, Holder, line_of, peak_lines, peak_of_history


def frame(path: str, line: int, name: str) -> dict:
    return {"filename": path, "line": line, "name": name}


MLP = [frame("/x/torch/nn/functional.py", 1, "linear"), frame("/x/megafp8/core/mlp.py", 7, "forward"),
       frame("/x/megafp8/core/layer.py", 9, "forward")]  # fmt: skip
NORM = [frame("/x/kernels/norm.py", 3, "norm")]


def alloc(address: int, size: int, frames=(), time: int = 0) -> dict:
    return {"action": "alloc", "addr": address, "size": size, "frames": frames, "time_us": time}


def free(address: int, time: int = 0) -> dict:
    return {"action": "free_requested", "addr": address, "size": 0, "time_us": time}


HISTORY = [
    alloc(1, 100, NORM),
    {"action": "segment_alloc", "addr": 9, "size": 1 << 30, "frames": []},
    alloc(2, 50, MLP),
    alloc(3, 1000, MLP),  # more than ever later
    free(3),
    alloc(3, 60, MLP, time=5),
    alloc(4, 7, time=6),  # 217: the peak since 5
    free(1, time=7),
    alloc(1, 90, NORM, time=8),
    free(2, time=9),
]


def test_holders_at_the_moment_of_most():
    peak = peak_of_history(HISTORY, since=5)
    assert peak.bytes == 217
    line = "core/mlp.py:7 forward < core/layer.py:9 forward"
    assert peak.holders == [Holder(line, 110, 2), Holder("kernels/norm.py:3 norm", 100, 1), Holder(NO_LINE, 7, 1)]
    assert peak.during == NO_LINE
    assert peak_of_history(HISTORY).bytes == 1150
    assert peak_of_history(HISTORY).during == line
    assert peak_of_history([]).holders == []


def test_only_lines_of_the_project_count():
    assert line_of(MLP[:1]) == NO_LINE
    assert line_of(MLP * 2).count("<") == 2, "three calls at most"


def test_a_page_of_the_largest():
    lines = peak_lines(peak_of_history(HISTORY, since=5), most=1)
    assert lines[0] == f"0.0 MiB at the peak, in {NO_LINE}; held by"
    assert [line.split()[1] for line in lines[1:]] == ["2", "2"]
    assert lines[-1].endswith("2 others")
