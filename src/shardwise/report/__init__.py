"""A report of one run or several as one HTML page that needs nothing outside itself. No torch."""

from __future__ import annotations

from shardwise.report.page import page
from shardwise.report.runs import RunFiles, read_run

__all__ = ["RunFiles", "page", "read_run"]
