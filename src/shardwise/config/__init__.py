"""Configurations: strict TOML, `extends`, `--set`, every mistake told at once, every value's source known."""

from shardwise.config.effective import Effective, load
from shardwise.config.schema import BUILTINS, Config
from shardwise.config.sources import Given, from_table
from shardwise.config.starter_file import show, starter

__all__ = ["BUILTINS", "Config", "Effective", "Given", "from_table", "load", "show", "starter"]
