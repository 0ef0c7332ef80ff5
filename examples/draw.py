"""What the examples share: their options, and pictures as SVG: lines over steps, arrays of pixels."""

import argparse
import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import numpy as np

COLOURS = ("#1f6f8b", "#c8553d", "#7a7a7a", "#588157")
LEFT, TOP, FOOT = 64, 34, 40


def asked(about: str, steps: int, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of an example."""
    ask = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--plan", default="single", help="how to spread it: dp_shard=2,zero=3 (default: one process)")
    ask.add_argument("--steps", type=int, default=steps, help="optimizer steps (default: %(default)s)")
    ask.add_argument("--out", type=Path, default=Path("runs"), help="folder of runs and pictures")
    return ask.parse_args(arguments)


def text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(words)}</text>'


def ticks(low: float, high: float, least: float = 0, count: int = 6) -> np.ndarray:
    """At most `count` + 1 round numbers from low to high: 1, 2 or 5 times a power of ten apart, `least` or more."""
    power = 10.0 ** np.floor(np.log10((high - low or 1) / count))
    step = max(least, min(m * power for m in (1, 2, 5, 10) if m * power * count >= high - low))
    return np.arange(np.ceil(low / step), np.floor(high / step) + 1) * step


def lines(curves: Mapping[str, Sequence[tuple[float, float]]], title: str, unit: str, width=640, height=280) -> str:
    """Curves of (x, y) points, with a legend."""
    points = np.array([p for curve in curves.values() for p in curve], float)
    (x0, y0), (x1, y1) = points.min(0), points.max(0)
    y0, y1 = y0 - 0.05 * (y1 - y0 or 1), y1 + 0.05 * (y1 - y0 or 1)

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x0) / (x1 - x0 or 1) * (width - LEFT - 20)
        return across, height - FOOT - (y - y0) / (y1 - y0) * (height - FOOT - TOP)

    drawn = [text(LEFT, 20, title, 'font-weight="bold"'), text(width - 60, height - 8, "step")]
    for y in ticks(y0, y1):
        at = place(x0, y)[1]
        drawn.append(f'<line x1="{LEFT}" x2="{width - 20}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        drawn.append(text(LEFT - 6, at + 4, f"{y:g}", 'text-anchor="end"'))
    for x in ticks(x0, x1, least=1):
        drawn.append(text(place(x, y0)[0], height - 22, f"{x:g}", 'text-anchor="middle"'))
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in (place(*p) for p in curve))
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        drawn.append(text(width - 210, TOP + 16 + 17 * number, f"{name} ({unit})", f'fill="{colour}"'))
    return sheet(drawn, width, height)


def pixels(x: float, y: float, width: float, height: float, colours: np.ndarray) -> str:
    """An image of (rows, columns, 3) bytes at a place of a sheet, pixels kept sharp."""
    rows, columns, _ = colours.shape
    raw = b"".join(b"\0" + row.tobytes() for row in colours.astype(np.uint8))
    head = struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)  # the PNG specification, 11.2.2
    data = b"\x89PNG\r\n\x1a\n"
    for kind, body in ((b"IHDR", head), (b"IDAT", zlib.compress(raw, 9)), (b"IEND", b"")):
        data += struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    return (
        f'<image x="{x}" y="{y}" width="{width}" height="{height}" preserveAspectRatio="none" '
        f'style="image-rendering:pixelated" href="data:image/png;base64,{base64.b64encode(data).decode()}"/>'
    )


def shaded(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """(rows, columns) as colours: blue, white, red; grey where there is no value."""
    share = np.clip((np.nan_to_num(values, nan=low) - low) / (high - low), 0, 1)[..., None]
    blue, white, red = (np.array(c, float) for c in ((33, 102, 172), (247, 247, 247), (178, 24, 43)))
    colours = np.where(share < 0.5, blue + 2 * share * (white - blue), white + (2 * share - 1) * (red - white))
    return np.where(np.isnan(values)[..., None], (190, 190, 180), colours)


def sheet(drawn: Sequence[str], width: float, height: float) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
    ground = 'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
    return head + ground + "\n".join(drawn) + "</svg>\n"


def losses(records: Sequence[Mapping], key: str = "loss") -> list[tuple[float, float]]:
    """(step, value) of a run's records that have this number."""
    return [(record["step"], record[key]) for record in records if record.get(key) is not None]


def save(picture: str, path: Path) -> None:
    """Write a picture, and say where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(picture, encoding="utf-8")
    print(f"picture   {path}")
