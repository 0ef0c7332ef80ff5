"""`shardwise report`: one page that holds all it needs, of runs that ended, are under way, or were profiled."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from shardwise.cli.main import call
from shardwise.report.charts import POINTS, WIDE, bars, lines, thinned, ticks
from shardwise.report.runs import settings

CONFIG = """# a run
[task]
name = "text"                    # the task argument
# tokenizer =                    # no effect: task.files is not set

[plan]                           # 2 rank(s)
dp_replicate = {ranks}                 # --plan
"""


def write_run(folder: Path, name: str, *, steps: int = 900, ranks: int = 2, ended: bool = True) -> Path:
    """A run's folder as `train` writes it, made up."""
    run = folder / name
    run.mkdir(parents=True)
    rows = [
        {
            "step": step + 1, "loss": 5 - step / steps + 0.01 * (step % 7), "seconds": 0.02, "input_seconds": 0.001,
            "tokens_per_s": 1e4 + step,
        }
        for step in range(steps)
    ]  # fmt: skip
    text = "\n".join(json.dumps(row) for row in rows)
    text += "\n" + json.dumps({"step": steps, "eval_loss": 4.2, "eval_weight": 9.0})
    (run / "metrics.jsonl").write_text(text + "\n" + ("" if ended else '{"step": 9'))
    (run / "config.toml").write_text(CONFIG.format(ranks=ranks))
    (run / "plan.toml").write_text(f"[plan]\ndp_replicate = {ranks}\n")
    (run / "versions.json").write_text(json.dumps({"torch": "2.13", "shardwise": "0.1", "python": "3.11"}))
    (run / "ledger.json").write_text(
        json.dumps({"collectives": [{"tag": "gradients", "op": "all_reduce", "calls": 2, "received_bytes": 131}]})
    )
    if ended:
        memory = [{"parameters": 2**20 * (rank + 1), "gradients": 2**20, "optimizer": 2**21} for rank in range(ranks)]
        forecast = {"beside": {"step": [0.019, 0.02], "parameters": [2**20, 2**21]}}
        (run / "summary.json").write_text(
            json.dumps(
                {
                    "task": "text",
                    "plan": f"dp_replicate={ranks}",
                    "world_size": ranks,
                    "memory": memory,
                    "forecast": forecast,
                    "unit": "tokens",
                }
            )
        )
    return run


class Page(HTMLParser):
    """Tags as they open and close; what the page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.fetched += [value for name, value in attrs if name in ("src", "href") and not value.startswith("data:")]
        if tag not in ("meta", "link", "rect", "line", "circle", "polyline", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if self.open and self.open[-1] == tag:
            self.open.pop()


@pytest.fixture
def runs(tmp_path):
    write_run(tmp_path, "one")
    write_run(tmp_path, "two", ranks=4)
    write_run(tmp_path, "under-way", ended=False, steps=3)
    return tmp_path


def test_three_runs_are_one_page_without_anything_from_outside(runs, capfd):
    args = ["report", *(str(runs / name) for name in ("one", "two", "under-way")), "-o", str(runs / "page.html")]
    assert call(args) == 0
    assert "wrote" in capfd.readouterr().out
    text = (runs / "page.html").read_text()
    assert len(text) < 2 * 2**20
    page = Page()
    page.feed(text)
    assert page.open == [] and page.fetched == []
    for word in ("loss of a step", "held-out loss", "tokens a second", "where a step went", "what each rank holds",
                 "Forecast beside measurement", "all_reduce", "the task argument", "(not ended)", "-5.0%"):  # fmt: skip
        assert word in text, word
    for look in ("prefers-color-scheme:dark", "@media print", "max-width:760px"):
        assert look in text
    assert "dp_replicate" in text.split("Settings that are not alike")[1].split("<details>")[0]


def test_the_tasks_own_numbers_are_drawn(tmp_path):
    run = write_run(tmp_path, "own", steps=0)
    rows = [
        {"step": step, "loss": 1.0, "seconds": 0.1, "tokens_per_s": 1.0, "extra/box": 0.5 - step, "metric/rmse/0": 0.25}
        for step in range(1, 5)
    ]
    rows.append({"step": 4, "eval_loss": 4.2, "eval_metric/rmse/0": 0.75, "ema_eval_metric/rmse/0": 0.5})
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert call(["report", str(run)]) == 0
    text = (run / "report.html").read_text().split("<h2>Metrics and extra terms</h2>")[1].split("<h2>")[0]
    captions = re.findall("<figcaption>(.*?)</figcaption>", text)
    assert captions == ["box", "rmse/0", "rmse/0, held-out", "rmse/0, held-out, of the average"]
    assert "own, step 4: 0.75" in text


def test_a_run_that_has_not_ended_tells_its_task_its_plan_and_its_ranks(tmp_path):
    run = write_run(tmp_path, "under-way", ranks=3, ended=False)
    assert call(["report", str(run)]) == 0
    cells = dict(re.findall("<td>(task|plan|ranks)</td><td>(.*?)</td>", (run / "report.html").read_text()))
    assert cells == {"task": "text", "plan": "<code>dp_replicate=3</code>", "ranks": "3"}


def test_a_loss_that_was_not_finite_is_told(tmp_path):
    run = write_run(tmp_path, "diverged", steps=3)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[0]["loss"] = lines[3]["eval_loss"] = None  # as the file has what is not finite
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert call(["report", str(run)]) == 0
    cells = dict(re.findall("<td>(loss|held-out loss)</td><td>(.*?)</td>", (run / "report.html").read_text()))
    assert cells == {"loss": "not finite → 4.353", "held-out loss": "not finite"}


def test_what_a_run_says_cannot_become_markup(tmp_path):
    run = write_run(tmp_path, "odd")
    (run / "config.toml").write_text('[task]\nname = "<script>alert(1)</script>"   # --set\n')
    (run / "summary.json").write_text(json.dumps({"task": "<b>x</b>", "plan": "a&b"}))
    assert call(["report", str(run)]) == 0
    text = (run / "report.html").read_text()
    assert "<script>" not in text and "<b>x" not in text and "a&amp;b" in text


@pytest.mark.parametrize(
    ("name", "told"), [("nowhere", "there is no folder"), (".", "it has no metrics.jsonl"), ("empty", "no step yet"),
                      ("failed", "failed before its first step: its error.log says why")]
)  # fmt: skip
def test_what_is_no_run_is_refused(name, told, tmp_path, monkeypatch, capfd):
    (tmp_path / "empty").mkdir()
    (tmp_path / "failed").mkdir()
    (tmp_path / "failed" / "error.log").write_text("ValueError")
    (tmp_path / "empty" / "metrics.jsonl").write_text("")
    monkeypatch.chdir(tmp_path)
    assert call(["report", name]) == 2
    assert told in capfd.readouterr().err


def test_settings_are_read_with_their_origin():
    assert settings(CONFIG.format(ranks=2)) == {
        "task.name": ('"text"', "the task argument"),
        "plan.dp_replicate": ("2", "--plan"),
    }


def test_long_lines_are_thinned_to_means():
    points = [(float(step), float(step % 2)) for step in range(10 * POINTS)]
    found = thinned(points)
    assert len(found) == POINTS and {value for _, value in found} == {0.5} and found[-1][0] == points[-1][0]
    assert ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0]) and ticks(3, 3) == [3]
    assert lines([(0, "none", [])], "nothing") == ""
    assert "nan" not in lines([(0, "some", [(1.0, 2.0), (2.0, float("nan"))])], "some")


def test_bars_leave_room_for_their_names_and_totals():
    drawn = bars(
        [("a run with a long name", {"a": 900.0, "b": 99.0}), ("short", {"a": 1.0})], "bytes", "MiB", {"a": 0, "b": 1}
    )
    found = re.findall(r"<rect[^>]* x='([\d.]+)'[^>]* width='([\d.]+)'", drawn)
    boxes = [(float(x), float(wide)) for x, wide in found]
    assert min(x for x, _ in boxes) > 22 * 8 and max(x + wide for x, wide in boxes) < WIDE - 8 * len("999 MiB")
    assert "999 MiB" in drawn


def test_runs_counted_in_other_units_each_have_a_chart_and_names_lose_what_is_alike(tmp_path):
    one, two = (write_run(tmp_path, f"20260101-10{at}000-{name}", steps=9) for at, name in enumerate(("text", "own")))
    rows = (two / "metrics.jsonl").read_text().replace("tokens_per_s", "samples_per_s")
    (two / "metrics.jsonl").write_text(rows)
    told = json.loads((two / "summary.json").read_text())
    (two / "summary.json").write_text(json.dumps({**told, "unit": "samples"}))
    assert call(["report", str(one), str(two), "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "tokens a second" in page and "samples a second" in page
    assert ">100000-text rank 1</text>" in page and ">101000-own rank 0</text>" in page


def test_where_a_profiled_step_went_is_counted_once(tmp_path):
    run = write_run(tmp_path, "one", steps=9, ranks=1)
    (run / "profile").mkdir()
    table = {"input": 1.0, "compute": 5.0, "idle": 2.0, "measured": 8.0}
    (run / "profile" / "table.json").write_text(json.dumps({"steps": [5], "unit": "ms per step", "ranks": [table]}))
    assert call(["report", str(run), "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert ">8 ms</text>" in page and "measured 8 ms" not in page


OVERFLOW = """<script>addEventListener('load', () => {
const all = [document.documentElement, ...document.querySelectorAll('.wide')].map(e => e.scrollWidth > e.clientWidth);
const cut = [...document.querySelectorAll('svg text')].map(t => [t, t.closest('svg')].map(
e => e.getBoundingClientRect())).map(([t, s]) => t.left < s.left - 1 || t.right > s.right + 1);
parent.document.title = [innerWidth, all.includes(true), cut.includes(true)].join()})</script>"""


def test_a_telephone_shows_names_whole(tmp_path):
    """In a frame of 390 pixels, since a window of this browser is no narrower than 500."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no headless browser is installed here")
    names = ("20260101-101500-a_run_with_quite_a_long_name_of_its_own", "20260101-101600-text", "20260102-text")
    runs = [str(write_run(tmp_path, name, steps=9)) for name in names]
    assert call(["report", *runs, "-o", str(tmp_path / "page.html")]) == 0
    inside = html.escape((tmp_path / "page.html").read_text().replace("</body>", OVERFLOW + "</body>"))
    frame = f'<iframe style="width:390px;height:3000px;border:0" srcdoc="{inside}"></iframe>'
    (tmp_path / "frame.html").write_text(frame)
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=3000",
         "--dump-dom", (tmp_path / "frame.html").as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "<title>390,false,false</title>" in done.stdout


def test_a_browser_draws_it_without_an_error(runs, tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no headless browser is installed here")
    assert call(["report", str(runs / "one"), str(runs / "two"), "-o", str(runs / "page.html")]) == 0
    for width in (1280, 390):
        shot = tmp_path / f"{width}.png"
        done = subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--hide-scrollbars",
             f"--window-size={width},2600", f"--screenshot={shot}", (runs / "page.html").as_uri()],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert shot.stat().st_size > 10_000
        assert not re.findall(r"CONSOLE.*", done.stderr)
