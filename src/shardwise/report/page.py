"""`page`: the HTML report of runs side by side, with charts, tables, and each setting's source."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

from shardwise.report.charts import bars, lines, number
from shardwise.report.runs import RunFiles

COLOURS = 8  # after which runs repeat colours
LIGHT = ("#2f6bb0", "#d9641a", "#2f8a4c", "#a83a8d", "#b0301f", "#5d5ec9", "#7a6a1e", "#3d7f8c")
DARK = ("#79b0f0", "#ffa766", "#72cf92", "#e48ccb", "#ff8c7a", "#a9aaff", "#d6c46a", "#7fcad8")
VERSIONS = ("shardwise", "torch", "python")
MEMORY = ("parameters", "gradients", "optimizer")
# beginnings of the keys of a task's own metrics in records of steps, and of evaluations (training/loop writes them)
OF_STEPS, OF_HELD_OUT = ("extra/", "metric/"), ("eval_metric/", "ema_eval_metric/")


def style() -> str:
    """Returns the CSS for light and dark mode, wide and narrow screens, and print."""

    def colours(chosen: Sequence[str]) -> str:
        return "".join(f"--c{index}:{colour};" for index, colour in enumerate(chosen))

    classes = "".join(
        f".c{i}{{stroke:var(--c{i})}}.dot.c{i},.f{i}{{fill:var(--c{i})}}.k{i}{{background:var(--c{i})}}"
        for i in range(COLOURS)
    )
    light = f"--back:#fff;--text:#1d2229;--soft:#5c6672;--rule:#d9dee4;--card:#f6f8fa;{colours(LIGHT)}"
    dark = f"--back:#14181d;--text:#e6eaef;--soft:#9aa5b1;--rule:#333c46;--card:#1c2229;{colours(DARK)}"
    return (
        f":root{{{light}color-scheme:light dark}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
        "*{box-sizing:border-box}body{margin:0 auto;max-width:1240px;padding:20px;background:var(--back);"
        "color:var(--text);font:15px/1.45 system-ui,sans-serif}h1{font-size:1.5em;margin:.2em 0}"
        "h2{font-size:1.15em;margin:1.6em 0 .5em;border-bottom:1px solid var(--rule);padding-bottom:.2em}"
        ".pair{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:14px;align-items:start}"
        "figure{margin:0;background:var(--card);padding:10px;border-radius:6px;min-width:0}"
        "figcaption{font-weight:600;font-size:.92em}svg{width:100%;height:auto;display:block}"
        "svg text{font:12px system-ui,sans-serif;fill:var(--soft)}.grid{stroke:var(--rule);stroke-width:1}"
        ".line{fill:none;stroke-width:1.8}.key span{margin-right:12px;white-space:nowrap}.key{margin:.3em 0;"
        "font-size:.88em}.key i,td i,th i{display:inline-block;width:10px;height:10px;border-radius:2px;"
        "margin-right:5px}.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.92em;min-width:min(100%,340px)}"
        "td,th{text-align:left;padding:4px 12px 4px 0;border-bottom:1px solid var(--rule);vertical-align:top}"
        "td.n,th.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}"
        ".soft{color:var(--soft)}code{font-size:.95em;overflow-wrap:anywhere}summary{cursor:pointer;margin:.5em 0}"
        "@media screen and (max-width:760px){body{padding:10px}svg text{font-size:15px}"
        ".pair{grid-template-columns:minmax(0,1fr)}table{font-size:.74em}td,th{padding-right:6px}td:first-child{min-width:84px}}"
        f"@media print{{:root{{{light}}}body{{max-width:none;padding:0;font-size:11px}}figure,tr{{break-inside:avoid}}"
        f"h2,summary{{break-after:avoid}}details::details-content{{content-visibility:visible}}}}{classes}"
    )


def page(runs: Sequence[RunFiles]) -> str:
    """Returns the report of these runs as one self-contained HTML page."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    body = [
        f"<h1>{_text(title)}</h1>",
        _overview(runs),
        _section("Loss", _pair([_loss(runs), _held_out(runs)])),
        _section("Metrics and extra terms", _pair(_own(runs))),
        _section("Speed", _pair([*_speed(runs), _where(runs)])),
        _section("Memory", _pair([_memory(runs)])),
        _section("Forecast beside measurement", _forecasts(runs)),
        _section("On the wire in one step (rank 0)", _wire(runs)),
        _section("Configuration", _settings(runs)),
    ]
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width,initial-scale=1'>"
        f"<title>{_text(title)} · shardwise</title><link rel='icon' href='data:,'><style>{style()}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _text(value: Any) -> str:
    return html.escape(str(value))


def _section(title: str, content: str) -> str:
    return f"<section><h2>{_text(title)}</h2>{content}</section>" if content else ""


def _pair(parts: Iterable[str]) -> str:
    charts = [part for part in parts if part]
    return f"<div class='pair'>{''.join(charts)}</div>" if charts else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: int = 0) -> str:
    """Returns an HTML table, "" without rows; cells are HTML, and the last `numbers` columns are right-aligned."""
    if not rows:
        return ""
    first = len(head) - numbers
    cells = "".join(f"<th{' class=n' if at >= first else ''}>{cell}</th>" for at, cell in enumerate(head))
    lines_ = "".join(
        "<tr>" + "".join(f"<td{' class=n' if at >= first else ''}>{cell}</td>" for at, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f"<div class='wide'><table><tr>{cells}</tr>{lines_}</table></div>"


def _named(runs: Sequence[RunFiles]) -> list[str]:
    return [f"<i class='k{at % COLOURS}'></i>{_broken(run.name)}" for at, run in enumerate(runs)]


def _overview(runs: Sequence[RunFiles]) -> str:
    """Returns the HTML table of the main results, with one column for each run."""
    rows: list[tuple[str, Callable[[RunFiles], str]]] = [
        ("task", lambda run: _broken(run.task)),
        ("plan", _plans),
        ("ranks", lambda run: _text(run.summary.get("world_size") or (run.plan.world_size if run.plan else ""))),
        # a run without a summary is still running, or was killed
        ("steps", lambda run: f"{len(run.steps)}" + ("" if run.summary else " (not ended)")),
        ("loss", lambda run: f"{_loss_of(run.steps[0])} → {_loss_of(run.steps[-1])}"),
        ("held-out loss", lambda run: _loss_of(run.held_out[-1], "eval_loss") if run.held_out else "–"),
        ("speed", lambda run: f"{number(_typical(run))} {run.unit}/s"),
        ("step, median", lambda run: _seconds(median(row["seconds"] for row in run.steps))),
        ("device", lambda run: _text(run.versions.get("device", ""))),
        ("versions", lambda run: _text(", ".join(f"{name} {run.versions.get(name)}" for name in VERSIONS))),
    ]
    return _table(["", *_named(runs)], [(name, *[cell(run) for run in runs]) for name, cell in rows])


def _loss_of(record: dict[str, Any], name: str = "loss") -> str:
    """Returns the value `name` of a record as text; a value that was not finite is None there."""
    return "not finite" if record[name] is None else f"{record[name]:.4g}"


def _plans(run: RunFiles) -> str:
    """Returns a run's plan as HTML, or all its plans if it was resumed under others."""
    # only a run that has ended has its plan in the summary
    plans = run.summary.get("plans") or [run.summary.get("plan") or run.plan or ""]
    return "<br>".join(f"<code>{_text(plan)}</code>" for plan in plans)


def _typical(run: RunFiles) -> float:
    values = [value for _, value in run.column(f"{run.unit}_per_s")]
    return median(values[1:] or values or [0.0])


def _loss(runs: Sequence[RunFiles]) -> str:
    return lines([(at % COLOURS, run.name, run.column("loss")) for at, run in enumerate(runs)], "loss of a step")


def _held_out(runs: Sequence[RunFiles]) -> str:
    """Returns the chart of held-out losses, "" without evaluations."""
    series = [(at % COLOURS, run.name, run.column("eval_loss", of_steps=False)) for at, run in enumerate(runs)]
    return lines(series, "held-out loss", dots=True)


def _own(runs: Sequence[RunFiles]) -> list[str]:
    """Returns a chart for each metric and extra loss term of the tasks, in training and on held-out data."""
    charts = []
    for of_step, begins in ((True, OF_STEPS), (False, OF_HELD_OUT)):
        records = [row for run in runs for row in (run.steps if of_step else run.held_out)]
        for name in dict.fromkeys(key for row in records for key in row if key.startswith(begins)):
            series = [(at % COLOURS, run.name, run.column(name, of_step)) for at, run in enumerate(runs)]
            where = "" if of_step else ", held-out, of the average" if name.startswith("ema_") else ", held-out"
            charts.append(lines(series, name.partition("/")[2] + where, dots=not of_step))
    return charts


def _speed(runs: Sequence[RunFiles]) -> list[str]:
    """Returns a chart of speed for each unit ("samples", "tokens") that the runs have."""
    units = list(dict.fromkeys(run.unit for run in runs))
    series = [(at % COLOURS, run.name, run.column(f"{run.unit}_per_s")[1:]) for at, run in enumerate(runs)]
    pairs = list(zip(runs, series, strict=True))
    return [lines([line for run, line in pairs if run.unit == unit], f"{unit} a second") for unit in units]


def _where(runs: Sequence[RunFiles]) -> str:
    """Returns a bar chart of a step's milliseconds by kind, of each rank of profiled runs.

    A run that was not profiled has one bar with the median step and the median wait for input.
    """
    rows: list[tuple[str, dict[str, float]]] = []
    for run, name in zip(runs, _short(runs), strict=True):
        tables = run.profile.get("ranks", [])
        for rank, table in enumerate(tables):
            spent = {kind: ms for kind, ms in table.items() if kind != "measured"}  # "measured" is the total
            parts = {kind: float(ms) for kind, ms in spent.items() if isinstance(ms, int | float) and ms > 0}
            rows.append((f"{name} rank {rank}", parts))
        if not tables:
            waits = median(row.get("input_seconds", 0.0) for row in run.steps)
            rows.append((name, {"step": 1e3 * median(r["seconds"] for r in run.steps), "input": 1e3 * waits}))
    kinds = list(dict.fromkeys(kind for _, parts in rows for kind in parts))
    colours = {kind: at % COLOURS for at, kind in enumerate(kinds)}
    return bars(rows, "where a step went", "ms", colours)


def _memory(runs: Sequence[RunFiles]) -> str:
    """Returns a bar chart of the bytes that each rank holds (parameters, gradients, optimizer state)."""
    held = [(f"{short} rank {rank}", {name: each.get(name) or 0 for name in MEMORY})
            for run, short in zip(runs, _short(runs), strict=True)
            for rank, each in enumerate(run.summary.get("memory", []))]  # fmt: skip
    most = max((sum(parts.values()) for _, parts in held), default=0)
    unit, one = ("MiB", 2**20) if most >= 2**20 else ("KiB", 2**10)
    rows = [(name, {part: size / one for part, size in parts.items()}) for name, parts in held]
    colours = {name: at for at, name in enumerate(MEMORY)}
    return bars(rows, "what each rank holds at the end, by class", unit, colours)


def _short(runs: Sequence[RunFiles]) -> list[str]:
    """Returns the runs' names without their common first parts (such as the date), at most 20 letters of the end."""
    parts = [run.name.split("-") for run in runs]
    alike = next((at for at, each in enumerate(zip(*parts, strict=False)) if len(set(each)) > 1), 0)
    # a name of common parts alone is kept complete
    names = ["-".join(each[alike:]) or "-".join(each) for each in parts]
    return [name if len(name) <= 20 else f"…{name[-19:]}" for name in names]


def _broken(name: Any) -> str:
    """Returns a name as HTML that a browser may wrap after an underscore, as it does after a hyphen."""
    return _text(name).replace("_", "_<wbr>")


def _key(name: str) -> str:
    """Returns a setting's name as HTML that a browser may wrap after a dot."""
    return f"<code>{_text(name).replace('.', '.<wbr>')}</code>"


def _forecasts(runs: Sequence[RunFiles]) -> str:
    """Returns the HTML table of forecast and measured figures, "" if no run has a forecast."""
    rows = []
    for run, name in zip(runs, _named(runs), strict=True):
        for what, pair in (run.summary.get("forecast") or {}).get("beside", {}).items():
            forecast, measured = pair
            off = "–" if not measured else f"{forecast / measured - 1:+.1%}"
            shown = [_quantity(what, value) for value in (forecast, measured)]
            rows.append((name, _text(what), *shown, off))
    return _table(["run", "what", "forecast", "measured", "off by"], rows, numbers=3)


def _quantity(what: str, value: float | None) -> str:
    if value is None:
        return "–"
    return _seconds(value) if what == "step" else _bytes(value)


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def _bytes(value: float) -> str:
    return f"{value / 2**20:.3g} MiB" if value >= 2**18 else f"{value:,.0f} bytes"


def _wire(runs: Sequence[RunFiles]) -> str:
    """Returns the HTML table of a step's collectives with their calls and bytes."""
    rows = []
    for run, name in zip(runs, _named(runs), strict=True):
        for row in run.wire:
            sent = next((row[key] for key in ("received_bytes", "bytes") if key in row), 0)
            rows.append((name, _text(row.get("op", "")), _text(row.get("tag", "")), str(row.get("calls", "")),
                         _bytes(sent)))  # fmt: skip
    return _table(["run", "collective", "for", "calls", "bytes"], rows, numbers=2)


def _settings(runs: Sequence[RunFiles]) -> str:
    """Returns HTML with a table of the settings in which runs differ, then all settings of each run with sources."""
    keys = list(dict.fromkeys(key for run in runs for key in run.settings))
    apart = [key for key in keys if len({run.settings.get(key, ("", ""))[0] for run in runs}) > 1]
    tables = ""
    # a single run has nothing to compare with
    if len(runs) > 1:
        rows = [(_key(key), *[_setting(run, key) for run in runs]) for key in apart]
        tables += "<p>Settings that are not alike:</p>" + (_table(["", *_named(runs)], rows) or "<p>none</p>")
    for run, name in zip(runs, _named(runs), strict=True):
        rows = [
            (_key(key), f"<code>{_text(value)}</code>", f"<span class=soft>{_text(source)}</span>")
            for key, (value, source) in run.settings.items()
        ]
        head = f"every setting of {name}, and where it came from"
        tables += f"<details><summary>{head}</summary>{_table(['key', 'value', 'from'], rows)}</details>"
    return tables


def _setting(run: RunFiles, key: str) -> str:
    value, source = run.settings.get(key, ("–", ""))
    return f"<code>{_text(value)}</code> <span class=soft>{_text(source)}</span>"
