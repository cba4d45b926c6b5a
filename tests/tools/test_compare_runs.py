"""tools/compare_runs.py: gaps by hand, missing points, the verdict, and the picture."""

import json
from pathlib import Path

import compare_runs
import numpy as np
import pytest
from compare_bytes import arranged

from megafp8.config import parse_args, with_vocab_size, write_args
from tests.training.runs import flags


def write_run(path: Path, losses: dict[int, float], valid: dict[int, float]) -> Path:
    path.mkdir()
    lines = [{"iteration": i, "lm_loss": v} for i, v in losses.items()]
    lines += [{"iteration": i, "valid_loss": v, "valid_ppl": 0.0} for i, v in valid.items()]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_gap_is_of_the_last_quarter_of_common_iterations(tmp_path):
    base = write_run(tmp_path / "a", dict.fromkeys(range(1, 9), 4.0), {4: 2.0, 8: 2.0})
    other = write_run(tmp_path / "b", {i: 9.0 if i <= 6 else 4.4 for i in range(1, 13)}, {8: 2.1, 12: 1.0})
    runs = [compare_runs.load_run(p, p.name) for p in (base, other)]
    gap = compare_runs.gap_of(runs[1], runs[0], window=1)
    assert gap.train == pytest.approx(0.1)
    assert gap.valid == pytest.approx(0.05)
    assert gap.largest == pytest.approx(1.25)


def test_smoothing_keeps_means_and_leaves_out_ends():
    values = np.arange(10, dtype=float)
    assert np.array_equal(compare_runs.smooth(values, 1), values)
    smoothed = compare_runs.smooth(values, 3)
    assert np.allclose(smoothed[1:-1], values[1:-1])
    assert np.isnan(smoothed[[0, -1]]).all()
    noisy = np.array([4.0, 1.0, 1.0, 7.0, 2.0])
    assert np.allclose(compare_runs.smooth(noisy, 5)[1:-1], [2, 3, 10 / 3])


def test_noise_at_the_end_of_a_curve_is_no_gap(tmp_path):
    """One point that jumps by 2% must not show as a gap where the window has narrowed to it."""
    base = write_run(tmp_path / "a", dict.fromkeys(range(1, 201), 4.0), {})
    other = write_run(tmp_path / "b", {i: 4.08 if i in (1, 200) else 4.0 for i in range(1, 201)}, {})
    runs = [compare_runs.load_run(path, path.name) for path in (base, other)]
    window = compare_runs.default_window(runs)
    iterations, curve = compare_runs.gap_curve(runs[1], runs[0], window)
    assert window == 13
    assert np.nanmax(np.abs(curve)) == pytest.approx(0.02 / 7), "half of the window is there, at least"
    assert np.isfinite(curve[(iterations > 3) & (iterations < 198)]).all()
    assert compare_runs.gap_of(runs[1], runs[0], window).largest < 0.003


def test_skipped_steps_leave_the_rest_of_the_curve(tmp_path, capsys):
    """A NaN is no reason to lose a curve, and a run of nothing else is shown as what it is."""
    losses = dict.fromkeys(range(1, 41), 4.0)
    base = write_run(tmp_path / "a", losses, {40: 2.0})
    holes = {i: None if i in (10, 11, 12, 40) else 4.4 for i in losses}
    other = write_run(tmp_path / "b", holes, {40: float("nan")})
    broken = write_run(tmp_path / "c", dict.fromkeys(losses, None), {})
    runs = [compare_runs.load_run(p, p.name) for p in (base, other, broken)]
    gap = compare_runs.gap_of(runs[1], runs[0], window=3)
    assert (gap.train, gap.largest) == (pytest.approx(0.1), pytest.approx(0.1))
    assert np.isnan(gap.valid)
    assert np.isnan(compare_runs.smooth(runs[1].losses, 3)[10])
    assert np.isfinite(compare_runs.smooth(runs[1].losses, 3)[[8, 12, 30]]).all()
    picture = tmp_path / "out.png"
    assert compare_runs.main([str(base), str(other), str(broken), "--output", str(picture)]) == 0
    assert picture.stat().st_size > 0
    assert "nan%" in capsys.readouterr().out


@pytest.mark.parametrize(("points", "window"), [(8, 1), (60, 5), (300, 21), (10**4, 21)])
def test_a_short_run_is_smoothed_less(points, window):
    run = compare_runs.Run("x", np.arange(points), *[np.zeros(points)] * 3, {})
    assert compare_runs.default_window([run]) == window


def test_other_conditions_than_the_base_are_named(tmp_path, capsys):
    """A gap between two schedules or batch sizes is none between recipes."""
    lines = [{"iteration": i, "lm_loss": 4.0, "consumed_samples": 8 * i, "learning_rate": 1e-3} for i in (1, 2, 3)]
    other_rate = [*lines[:2], lines[2] | {"learning_rate": 2e-3}]
    other_batch = [line | {"consumed_samples": 4 * line["iteration"]} for line in lines]
    for name, run in {"base": lines, "same": lines, "rate": other_rate, "batch": other_batch}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in run))
    assert compare_runs.main([str(tmp_path / name) for name in ("base", "same", "rate", "batch")]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note:")]
    assert notes == [
        "note: not the same conditions: rate: learning rate 0.002 at iteration 3, base 0.001",
        "note: not the same conditions: batch: 4 samples at iteration 1, base 8",
    ]


def test_means_are_of_the_same_iterations(tmp_path, capsys):
    """A run that goes on from the middle of the base: its mean beside the base's gives its gap."""
    losses = {i: 8.0 - 0.1 * i for i in range(1, 41)}
    base, late = write_run(tmp_path / "a", losses, {}), write_run(tmp_path / "b", dict(list(losses.items())[20:]), {})
    assert compare_runs.main([str(base), str(late)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows[0][2] == rows[1][2] == "4.2000"  # of iterations 36 to 40
    assert rows[1][4] == "+0.000%"


def test_a_gap_without_common_points_is_a_dash(tmp_path, capsys):
    base, other = write_run(tmp_path / "a", {1: 4.0}, {1: 2.0}), write_run(tmp_path / "b", {1: 4.4}, {})
    assert compare_runs.main([str(base), str(other)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["b", "1", "4.4000", "-", "+10.000%", "-", "10.000%"]


def test_labels_leave_out_what_paths_have_in_common():
    paths = [Path("runs/tour/bf16"), Path("runs/tour/fp8/a"), Path("runs/tour/fp8/b")]
    assert compare_runs.short_labels(paths) == ["bf16", "fp8/a", "fp8/b"]
    assert compare_runs.short_labels([Path("runs/q/bf16"), Path("runs/q")]) == ["q/bf16", "q"]
    assert compare_runs.short_labels([Path("x/a"), Path("x/a")]) == ["a", "a"]


@pytest.mark.parametrize(("factor", "code"), [(1.005, 0), (1.02, 1), (float("nan"), 1)])
def test_verdict(tmp_path, factor, code, capsys):
    base = write_run(tmp_path / "a", {1: 4.0, 2: 4.0}, {2: 2.0})
    other = write_run(tmp_path / "b", {1: 4.0, 2: 4.0}, {2: 2.0 * factor})
    assert compare_runs.main([str(base), str(other), "--max-gap", "0.01"]) == code


def test_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    base = write_run(tmp_path / "a", {i: 4.0 / i for i in range(1, 9)}, {8: 2.0})
    output = tmp_path / "new" / "plot.png"
    assert compare_runs.main([str(base), str(base), "--labels", "x", "y", "--output", str(output)]) == 0
    assert output.read_bytes().startswith(b"\x89PNG")


def test_mistakes_are_one_line_and_exit_code_2(tmp_path, capsys):
    base = write_run(tmp_path / "a", {1: 4.0}, {})
    for argv in ([str(tmp_path / "none")], [str(base), "--labels", "x", "y"], [str(base), "--window", "0"]):
        assert compare_runs.main(argv) == 2
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--output", "OUT/file/x.png"], "--output"),
        (["--output", "OUT/x.xyz"], "--output"),
        (["--output", "OUT/x"], "--output"),
        (["--max-gap", "nan"], "--max-gap"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, argv, word):
    run = write_run(tmp_path / "a", {1: 4.0}, {})
    (tmp_path / "file").write_text("")
    assert compare_runs.main([str(run), str(run), *(a.replace("OUT", str(tmp_path)) for a in argv)]) == 2
    assert capsys.readouterr().err.startswith(f"compare_runs.py: error: {word}")


def series(path: Path, level: float, seed: int, count: int = 400) -> Path:
    """Losses about `level`, whose noise hangs together over neighbours."""
    noise = np.convolve(np.random.default_rng(seed).normal(0, 0.02, count + 20), np.ones(20) / 20, "valid")[:count]
    return write_run(path, {i + 1: level + float(noise[i]) for i in range(count)}, {count: level})


def test_confidence_interval_covers_the_true_gap(tmp_path):
    """Of correlated noise: a plain standard error would be several times too narrow."""
    hits, widths = 0, []
    for seed in range(40):
        base, other = (series(tmp_path / f"{seed}{n}", 4.0, 2 * seed + n) for n in (0, 1))
        gap = compare_runs.gap_of(compare_runs.load_run(other, "b"), compare_runs.load_run(base, "a"), window=1)
        hits += abs(gap.train) <= gap.interval
        widths.append(gap.interval)
    assert 32 <= hits <= 40
    assert max(widths) < 0.01, "so wide that it says nothing"
    assert np.isnan(compare_runs.half_interval(np.ones(7)))


@pytest.mark.parametrize(("level", "code"), [(4.01, 0), (4.05, 1)])
def test_verdict_allows_the_spread_of_two_seeds(tmp_path, capsys, level, code):
    """0.25% and what the seeds differ by, 0.1% here."""
    runs = [write_run(tmp_path / n, dict.fromkeys(range(1, 9), v), {8: v}) for n, v in
            (("bf16", 4.0), ("seed2", 4.004), ("blockwise", level))]  # fmt: skip
    argv = [*map(str, runs), "--noise", "seed2", "--budgets", "blockwise=0.0025"]
    assert compare_runs.main(argv) == code
    assert ("within" if code == 0 else "ABOVE") + " 0.25% + 0.100% between seeds" in capsys.readouterr().out


def test_page_holds_table_verdict_norms_and_scales(tmp_path):
    base = series(tmp_path / "bf16", 4.0, 0, 40)
    run = tmp_path / "fp8"
    run.mkdir()
    lines = [{"iteration": i, "lm_loss": 4.0, "grad_norm": 0.5} for i in range(1, 41)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    scales = [{"iteration": i, "linear": "a", "role": "input", "scale_inv_median": 2.0**-i} for i in (10, 20)]
    (run / "fp8_monitor.jsonl").write_text("".join(json.dumps(line) + "\n" for line in scales))
    page = tmp_path / "report.html"
    assert compare_runs.main([str(base), str(run), "--max-gap", "0.5", "--output", str(page)]) == 1, "no evaluation"
    text = page.read_text()
    assert "ABOVE 50.00%" in text
    assert "data:image/png;base64,iVBOR" in text
    import compare_report

    (x, values) = compare_report.scale_curves(run)["input"]
    assert (x.tolist(), values.tolist()) == ([10, 20], [-10.0, -20.0])


@pytest.mark.parametrize("argv", [["--budgets", "c=1"], ["--budgets", "b=-1"], ["--budgets", "b=x"], ["--noise", "a"]])
def test_wrong_labels_and_budgets_are_one_line(tmp_path, capsys, argv):
    runs = [str(write_run(tmp_path / n, {1: 4.0}, {})) for n in ("a", "b")]
    assert compare_runs.main([*runs, *argv]) == 2
    assert capsys.readouterr().err.startswith(f"compare_runs.py: error: {argv[0]} {argv[1]}: ")


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ("--labels x x", "--labels x x: x is there twice; give each run a name of its own"),
        ("--noise a", "--noise a: no run after the base is called 'a'; they are b"),
        ("--budgets a=1", "--budgets a=1: no run after the base is called 'a'; they are b"),
        ("--budgets b", "--budgets b: give LABEL=X, such as b=0.005"),
        ("--noise b --budgets b=1", "--budgets b=1: b is the --noise run, whose gap is allowed; leave one out"),
    ],
)
def test_labels_are_those_of_other_runs(tmp_path, capsys, argv, line):
    runs = [str(write_run(tmp_path / n, {1: 4.0}, {})) for n in ("a", "b")]
    assert compare_runs.main([*runs, *argv.split()]) == 2
    assert capsys.readouterr().err == f"compare_runs.py: error: {line}\n"


def test_a_base_alone_has_no_noise(tmp_path, capsys):
    run = str(write_run(tmp_path / "a", {1: 4.0}, {}))
    assert compare_runs.main([run, "--noise", "a"]) == 2
    told = "--noise a: no run after the base is called 'a'; give more runs, the base first\n"
    assert capsys.readouterr().err == f"compare_runs.py: error: {told}"


@pytest.mark.parametrize("budget", ["b=0.5%", "b=0,5", "b=-1"])
def test_a_budget_is_a_share(tmp_path, capsys, budget):
    runs = [str(write_run(tmp_path / n, {1: 4.0}, {})) for n in ("a", "b")]
    assert compare_runs.main([*runs, "--budgets", budget]) == 2
    assert capsys.readouterr().err.endswith("give a share of the loss, 0 or more: 0.005 is half a percent\n")


def test_the_validation_column_is_of_the_evaluation_that_the_gap_is_of(tmp_path, capsys):
    """A run that was evaluated after its last common iteration, and one that stopped early."""
    base = write_run(tmp_path / "base", {1: 4.0, 2: 4.0}, {4: 2.0, 8: 1.0})
    longer = write_run(tmp_path / "longer", {1: 4.0, 2: 4.0}, {8: 1.1, 12: 0.5})
    short = write_run(tmp_path / "short", {1: 4.0, 2: 4.0}, {4: 2.2})
    assert compare_runs.main([str(base), str(longer), str(short)]) == 0
    *rows, note = capsys.readouterr().out.splitlines()[2:]
    assert [row.split()[3] for row in rows] == ["1.0000", "1.1000", "2.2000"]
    assert [row.split()[5] for row in rows[1:]] == ["+10.000%", "+10.000%"]
    assert note == "note: short: validation at iteration 4, where base had 2.0000"


def test_runs_that_read_other_documents_are_named(tmp_path, capsys):
    runs = [write_run(tmp_path / name, {1: 4.0}, {}) for name in ("base", "same", "other", "silent")]
    for run, data in zip(runs, (["a"], ["a"], ["b"]), strict=False):
        start = [{"iteration": 0, "event": "start", "data": fingerprints} for fingerprints in (["x"], data)]
        (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in start))
    assert compare_runs.main([str(run) for run in runs]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note:")]
    assert notes == ["note: not the same conditions: other: other documents than base"]


BYTES = {
    "bf16": (),
    "blockwise": ("--fp8-format", "e4m3", "--fp8-recipe", "blockwise"),
    "weight-1d": ("--fp8-format", "e4m3", "--fp8-recipe", "blockwise", "--fp8-weight-tile", "1d"),
    "fc1-fp8": ("--fp8-format", "e4m3", "--fp8-recipe", "blockwise", "--activation-func-fp8-input-store"),
}


def test_bytes_are_those_of_a_rank_of_the_layout(tmp_path, capsys):
    """Of saved flags alone: the data and the tokenizer are gone. Copies come on top of BF16 weights, 1D tiles have more
    scales, fc1's output in FP8 holds less for backward, and what tensor ranks gather is half as long in FP8."""
    for name, words in BYTES.items():
        write_run(tmp_path / name, {1: 4.0}, {})
        size = ("--hidden-size", "512", "--ffn-hidden-size", "1024", "--seq-length", "512", "--swiglu")
        words = (*words, *(["--fp8-small-linears", "fp8"] if words else []))
        argv = flags(tmp_path / "gone", "--bf16", *size, "--max-position-embeddings", "512", *words)
        config = parse_args(argv, env={}, check_files=False)
        write_args(with_vocab_size(config, 300), tmp_path / name / "args.json")
    argv = [str(tmp_path / name) for name in BYTES]
    assert compare_runs.main([*argv, "--bytes"]) == 0
    alone = {cells[0]: [float(x) for x in cells[-3:]] for cells in rows_of(capsys)}
    layout = "--tensor-model-parallel-size 2 --sequence-parallel"
    assert compare_runs.main([*argv, "--gpus", "2", "--layout", layout]) == 0
    apart = {cells[0]: [float(x) for x in cells[-3:]] for cells in rows_of(capsys)}
    assert all(cells[2] == 0 for cells in alone.values())
    assert all(apart[name][0] < alone[name][0] for name in BYTES)
    assert alone["bf16"][0] < alone["blockwise"][0] < alone["weight-1d"][0]
    assert alone["fc1-fp8"][1] < alone["blockwise"][1] < alone["bf16"][1]
    assert apart["blockwise"][2] < apart["bf16"][2]
    (tmp_path / "bf16" / "args.json").unlink()
    rest = argv[1:]
    for wrong, words in (
        ([*argv, "--bytes"], "args.json: not there"),
        ([*rest, "--gpus", "0"], "--gpus 0: give 1 or more"),
        ([*rest, "--layout", "--swiglu '"], "--layout --swiglu ': No closing quotation"),
        ([*rest, "--bytes", "--output", str(tmp_path)], "can't write there; give another file"),
    ):
        assert compare_runs.main(wrong) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line


@pytest.mark.parametrize("kept", [(), ("attention.qkv", "attention.proj")])
def test_what_was_in_fp8_is_so_in_another_layout(tmp_path, kept):
    """Sizes may be too small for FP8 there alone, and a run of before the flag left out none."""
    size = ("--hidden-size", "512", "--ffn-hidden-size", "3584", "--seq-length", "512", "--global-batch-size", "4")
    argv = flags(tmp_path / "gone", "--bf16", "--fp8-format", "e4m3", *size, "--max-position-embeddings", "512")
    config = with_vocab_size(parse_args(argv, env={}, check_files=False), 300)
    assert config.fp8.small_linears_in_bf16 == ("attention.qkv", "attention.proj")
    write_args(config.replace(small_linears_in_bf16=kept), tmp_path / "args.json")
    for layout in ([], ["--micro-batch-size", "1"]):
        assert arranged(tmp_path, layout, None).fp8.small_linears_in_bf16 == kept


def test_a_layout_of_one_flag_is_told_how_to_be_written(capsys):
    for value, mend in (("--swiglu", "; write --layout=--swiglu"), ("--gpus", "; write --layout=--gpus"), ("", "")):
        with pytest.raises(SystemExit, match="2"):
            compare_runs.main(["run", "--layout", *filter(None, [value])])
        assert capsys.readouterr().err.endswith(f"error: --layout: expected one argument{mend}\n")


def rows_of(capsys):
    return [line.split() for line in capsys.readouterr().out.splitlines()[2:] if not line.startswith("note")]


PAGE = Path(__file__).resolve().parents[2] / "docs" / "trust.md"
RECIPES = ("blockwise", "tensorwise", "delayed", "mxfp8")


def table_of_the_page(columns: int) -> dict[str, list[str]]:
    """First cell -> cells, of the tables of docs/trust.md that have so many columns."""
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.read_text().splitlines()]
    return {row[0].strip("`"): row for row in cells if len(row) == columns}


def printed(capsys) -> dict[str, list[str]]:
    return {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if "%  " in line}


def assert_same(row: list[str], losses: slice, told: list[str]) -> None:
    """Losses to the digit, gaps as the page rounds them."""
    assert row[losses] == told[2:4]
    for cell, number in zip(row[losses.stop :], told[4:6], strict=False):
        assert float(cell.split()[0]) == pytest.approx(float(number.strip("%")), abs=0.006)


def test_the_published_regression_says_what_the_page_says(tmp_path, capsys):
    """docs/trust.md quotes its runs' table; the runs lie beside it."""
    runs = [PAGE.parent / "regression" / name for name in ("bf16", "bf16-seed2", *RECIPES)]
    budgets = ["--noise", "bf16-seed2", "--budgets", "blockwise=0.0025", "tensorwise=0.005"]
    assert compare_runs.main([*map(str, runs), *budgets, "--output", str(tmp_path / "loss.png")]) == 0
    told, rows = printed(capsys), table_of_the_page(9)
    assert {"bf16-seed2", *RECIPES} == set(told)
    for name, found in told.items():
        assert_same(rows[name], slice(1, 3), found)


def test_so_do_the_ablations(capsys):
    rows = table_of_the_page(7)
    folder = PAGE.parent / "regression" / "ablations"
    assert {path.name for path in folder.iterdir()} == rows.keys() - {"run", "---"}
    others = sorted(rows.keys() - {"run", "---", "bf16"})
    assert compare_runs.main([str(folder / name) for name in ("bf16", *others)]) == 0
    for name, found in printed(capsys).items():
        assert_same(rows[name], slice(2, 4), found)
