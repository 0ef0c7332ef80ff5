"""Makes a report of one or several runs as a self-contained HTML page. No torch."""

from __future__ import annotations

from shardwise.report.page import page
from shardwise.report.runs import RunFiles, read_run

__all__ = ["RunFiles", "page", "read_run"]
