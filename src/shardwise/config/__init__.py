"""Configurations: strict TOML, `extends`, `--set`; all mistakes are reported together, and every value has a source."""

from shardwise.config.effective import Effective, load
from shardwise.config.schema import BUILTINS, Config
from shardwise.config.sources import Given, from_table
from shardwise.config.starter_file import show, starter

__all__ = ["BUILTINS", "Config", "Effective", "Given", "from_table", "load", "show", "starter"]
