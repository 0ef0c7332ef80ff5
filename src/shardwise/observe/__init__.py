"""Watches a run: its folder, its metrics file, its display, and how much it computes."""

from shardwise.observe.flops import Flops, count_flops, peak_flops
from shardwise.observe.folder import make_folder, write_inputs, write_json
from shardwise.observe.input_waits import InputWatch
from shardwise.observe.metrics import MetricsFile, finite
from shardwise.observe.progress_display import Display
from shardwise.observe.summary import summary_text

__all__ = [
    "Display",
    "Flops",
    "InputWatch",
    "MetricsFile",
    "count_flops",
    "finite",
    "make_folder",
    "peak_flops",
    "summary_text",
    "write_inputs",
    "write_json",
]
