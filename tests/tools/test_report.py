"""The run report: what is on the page, that nothing of a run gets out of its text, and that a browser agrees."""

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
import report
import report_data
from report_charts import Axis, Curve, line_chart, numbers

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&quot;"
VOID = {"meta", "input", "img", "br", "link", "image"}
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")


def write_lines(path, lines, tail=""):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)


def training(iteration, **extra):
    return {
        "iteration": iteration,
        "lm_loss": 6 / iteration**0.1,
        "grad_norm": 1 / iteration,
        "learning_rate": 1e-3,
        "consumed_tokens": 64 * iteration,
        "tokens_per_second": 6400.0,
        "elapsed_ms": 10.0,
        "skipped": 0,
        "nan": 0,
        "tflops_per_gpu": 0.5,
        "max_memory_gib": 0.25,
    } | extra


def looked(iteration, linear, role, sqnr=31.0):
    return {
        "iteration": iteration,
        "linear": linear,
        "role": role,
        "amax": 1.0,
        "scale_inv_median": 2.0**-9,
        "underflow": 0.0,
        "saturated": 0.0,
        "sqnr_db": sqnr,
        "drift_octaves": None,
        "histogram": [1],
    }


def make_run(path, *, iterations=40, recipe="blockwise", monitor=True, name="name"):
    """A run's directory as a run leaves it."""
    path.mkdir()
    lines = [training(i, **({"lm_loss": None, "skipped": 1} if i in (7, 8) else {})) for i in range(1, iterations + 1)]
    lines += [{"iteration": i, "valid_loss": 5.0, "valid_ppl": 148.4} for i in (20, 40)]
    write_lines(path / "metrics.jsonl", lines)
    events = [
        (0, "start", "a new run"),
        (20, "save", "saved"),
        (25, "fp8-fallback", f"BF16: {name}"),
        (40, "end", "done"),
    ]
    write_lines(path / "events.jsonl", [{"iteration": i, "event": k, "message": m} for i, k, m in events])
    if monitor:
        places = [(f"layers.{n}.mlp.{name}", role) for n in (0, 2, 10) for role in ("input", "weight", "grad_output")]
        seen = [looked(i, *place, sqnr=20 + i / 10) for i in (10, 20, 30) for place in places]
        write_lines(path / "fp8_monitor.jsonl", seen)
    model = {"fp8_format": "e4m3", "fp8_recipe": recipe, "train_iters": iterations, "bf16": True, "world_size": 1}
    provenance = {"commit": "0123456789abcdef", "versions": {"megafp8": "0.1.0"}, "command": ["x", f"--title={name}"]}
    args = {"given": {"name": name}, "config": {"model": model}, "notes": [name], "provenance": provenance}
    (path / "args.json").write_text(json.dumps(args))
    return path


class Page(HTMLParser):
    """Tags, attributes and text of a page; raises where elements do not nest."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.text, self.headings, self.data = [], [], [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        inside = self.open[-1] if self.open else ""
        if inside == "h2":
            self.headings.append(data)
        elif inside == "script" and data.startswith("{"):
            self.data.append(json.loads(data))
        elif inside not in ("script", "style"):
            self.text.append(data)


def make_page(tmp_path, capsys, *argv):
    output = tmp_path / "report.html"
    assert report.main([*map(str, argv), "--output", str(output)]) == 0
    capsys.readouterr()
    return output


def test_two_runs_beside_each_other(tmp_path, capsys):
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two", recipe="tensorwise", monitor=False)
    page = Page(make_page(tmp_path, capsys, one, two).read_text())
    assert page.headings == ["Summary", "Curves", "Events", "FP8", "Arguments"]
    text = "\n".join(page.text)
    for part in ("40 of 40", "done", "5.0000 at 40", "2,560", "megafp8 0.1.0, commit 0123456789", "fp8-fallback"):
        assert part in text, part
    assert "skipped, as all up to 8" in text
    assert {"blockwise", "tensorwise"} <= set(page.text)  # the one argument that differs
    assert [part for part in page.text if part in ("fp8_recipe", "fp8_format")] == ["fp8_recipe"]
    loss = next(d for d in page.data if d["kind"] == "lines" and len(d["curves"]) == 4)
    assert [curve["name"] for curve in loss["curves"]] == ["one", "two", "one, validation", "two, validation"]
    sqnr, scales = (d for d in page.data if d["kind"] == "heat")
    assert sqnr["rows"] == [f"layers.{n}.mlp.name" for n in (0, 2, 10)]
    assert sqnr["panels"][0]["values"] == [[21.0, 22.0, 23.0]] * 3
    assert scales["panels"][2]["values"][0] == [-9.0] * 3


def test_hostile_text_stays_text_and_nothing_is_fetched(tmp_path, capsys):
    run = make_run(tmp_path / "run", name=EVIL)
    output = make_page(tmp_path, capsys, run, make_run(tmp_path / "other"), "--labels", EVIL, "b")
    page = Page(output.read_text())
    assert page.tags.count("script") == len(page.data) + 1
    assert "img" not in page.tags
    assert EVIL in "\n".join(page.text)
    for name, value in page.attributes:
        assert not name.startswith("on")
        assert name not in ("src", "href") or value.startswith("data:image/png;base64,")


def test_what_is_missing_is_left_out_or_named(tmp_path, capsys):
    bare = make_run(tmp_path / "bare", monitor=False)
    lines = [training(1), training(2), training(3), training(2), training(3)]  # killed after 3, resumed from 1
    write_lines(bare / "metrics.jsonl", lines, tail='{"iteration": 4, "lm_')
    (bare / "events.jsonl").unlink()
    (bare / "args.json").write_text("{")
    damaged = make_run(tmp_path / "damaged")
    strange = [{"iteration": None}, {"iteration": 1.5}, {"iteration": 41, "valid_loss": 5.0, "dataset": ["x"]}]
    with open(damaged / "metrics.jsonl", "a") as stream:
        stream.writelines(json.dumps(line) + "\n" for line in (*strange, training(42, elapsed_ms=1e999)))
    with open(damaged / "fp8_monitor.jsonl", "a") as stream:
        stream.write('half\n{"iteration": 40}\n')
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "metrics.jsonl").touch()
    page = Page(make_page(tmp_path, capsys, bare, damaged, empty).read_text())
    text = "\n".join(page.text)
    assert "bare: args.json: damaged" in text
    assert "went on from iteration 1, after 3" in text
    assert "damaged: metrics.jsonl: 2 damaged lines left out (number 43, 44)" in text
    assert "damaged: fp8_monitor.jsonl: 1 damaged line left out (number 28)" in text
    assert "empty: no training line yet" in text
    alone = Page(make_page(tmp_path, capsys, empty).read_text())
    assert alone.headings == ["Summary"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["nowhere"], "nowhere: no such directory; give a directory written by --log-dir"),
        (["."], "neither metrics.jsonl nor args.json there; there are the runs run"),
        (["run/profile"], "neither metrics.jsonl nor args.json there; give a directory"),
        (["run", "--labels", "a", "b"], "--labels: 2 names for 1 runs"),
        (["run", "--window", "0"], "--window 0"),
        (["run", "--output", "."], "is a directory"),
        (["run", "--output", "page.pdf"], "--output page.pdf: the page is HTML; give page.html"),
        (["run/metrics.jsonl"], "a file, not a directory"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, monkeypatch, argv, words):
    make_run(tmp_path / "run")
    (tmp_path / "run" / "profile").mkdir()
    monkeypatch.chdir(tmp_path)
    assert report.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("report.py: error: ")
    assert error.count("\n") == 1
    assert words in error
    assert not (tmp_path / "report.html").exists()


def test_long_runs_are_thinned_and_nothing_is_hidden():
    x, y = np.arange(60000.0), np.ones(60000)
    y[31234], y[500:600] = 50.0, np.nan
    told, mean, low, high = report_data.thin(x, y)
    assert len(told) == len(mean) == report_data.POINTS
    assert np.nanmax(high) == 50.0
    assert np.isnan(mean).sum() == 1
    drawing = line_chart([Curve(0, "a", x, y)], title="t", unit="u", window=51)
    assert len(drawing) < 80000
    flat = line_chart([Curve(0, "a", x, np.full(60000, 1e-4))], title="t", unit="u")
    assert flat.count(">0.0001<") == 1  # and not a chart of the rounding of means
    monitor = {(i, "a", "input"): {"sqnr_db": float(i % 10)} for i in range(4000)}
    (grid,) = report_data.grids(report_data.Run("a", None, monitor=monitor), "sqnr_db")
    assert grid.values.shape == (1, report_data.LOOKS)
    assert grid.values == pytest.approx(4.5)


def test_ticks_that_lie_close_are_told_apart():
    assert numbers([3.75, 3.7505, 3.751]) == ["3.75", "3.7505", "3.751"]
    assert numbers([0.0, 20000.0, 0.00002]) == ["0", "20000", "2e-5"]
    assert numbers([]) == []
    x, y = np.arange(40.0), np.linspace(3.7550, 3.7552, 40)
    drawing = line_chart([Curve(0, "a", x, y)], title="t", unit="u")
    ticks = re.findall(r'text-anchor="end">([\d.]+)<', drawing)
    assert len(set(ticks)) == len(ticks) > 2
    assert ">0<" in line_chart([Curve(0, "a", x, y)], title="t", unit="u", from_zero=True)


def test_axes_and_gaps():
    axis = Axis(1.0, 1000.0, 100.0, 0.0, log=True)
    assert [axis(v) for v in (1.0, 10.0, 1000.0)] == pytest.approx([100.0, 100 * 2 / 3, 0.0])
    assert axis.ticks[0] == 1.0
    assert axis.ticks[-1] == 1000.0
    drawing = line_chart([Curve(0, "a", np.arange(5.0), np.array([1, 2, math.nan, 4, 5]))], title="t", unit="u")
    line = drawing.split('class="line" d="')[1].split('"')[0]
    assert line.count("M") == 2  # a gap, not a bridge
    assert line_chart([Curve(0, "a", np.arange(3.0), np.full(3, math.nan))], title="t", unit="u") == ""


PROBE = """<script>{
const out = [], put = (name, value) => out.push(name + "=" + value);
const over = (svg, x, y) => { const box = svg.getBoundingClientRect(); svg.dispatchEvent(new PointerEvent("pointermove",
  {clientX: box.left + x * box.width, clientY: box.top + y * box.height, bubbles: true})); };
const charts = [...document.querySelectorAll("svg.chart")];
put("empty", charts.filter((svg) => svg.getBoundingClientRect().height < 50).length);
over(charts[0], .976, .5); put("lines", document.getElementById("tip").innerText.replaceAll("\\n", "|"));
const heat = document.querySelector('svg[aria-label^="Signal"]');
over(heat, .2, .2); put("heat", document.getElementById("tip").innerText.replaceAll("\\n", "|"));
document.querySelector('input[data-run="0"]').click();
put("hidden", [...document.querySelectorAll('g[data-run="0"]')].every((g) => getComputedStyle(g).display === "none"));
put("wide", document.documentElement.scrollWidth > innerWidth);
document.body.innerHTML = "<pre id=probe></pre>"; document.getElementById("probe").textContent = out.join("\\n");
}</script></body>"""


def test_in_a_browser(tmp_path, capsys):
    """Scripts run without an error, charts have a size, tooltips tell the numbers, boxes hide runs."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is on the PATH")
    output = make_page(tmp_path, capsys, make_run(tmp_path / "one", name=EVIL), make_run(tmp_path / "two"))
    output.write_text(output.read_text().replace("</body>", PROBE))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,900", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", output.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert 'id="probe"' in done.stdout, done.stderr
    told = done.stdout.split('id="probe">')[1].split("</pre>")[0].split("\n")
    assert "Uncaught" not in done.stderr
    loss = f"{6 / 40**0.1:.5g}"
    assert told[0] == "empty=0"
    assert told[1].startswith(f"lines=iteration 40|one: {loss}|two: {loss}|one, validation: 5|")
    assert told[2].startswith("heat=layers.0.mlp.")
    assert told[2].endswith("input|iteration 10|21 dB")
    assert told[3:5] == ["hidden=true", "wide=false"]


def test_numbers_beyond_floats_cost_themselves_alone(tmp_path, capsys):
    lines = [training(1), training(2, lm_loss=10**400), training(3, lm_loss=-1e308), training(4, lm_loss=1e308)]
    make_run(tmp_path / "run")
    write_lines(tmp_path / "run/metrics.jsonl", [*lines, training(10**18), training(5)])
    looks = [looked(1, "layers.²", "weight", 10**400), looked(1, "a", "weight")]
    write_lines(tmp_path / "run/fp8_monitor.jsonl", looks)
    assert report.main([str(tmp_path / "run"), "--output", str(tmp_path / "page.html")]) == 0
    assert "metrics.jsonl: 1 damaged line left out (number 5)" in capsys.readouterr().out
    run = report_data.load_run(tmp_path / "run", "run")
    assert np.isfinite(run.curve("lm_loss")[1]).tolist() == [True, False, False, False, True]
