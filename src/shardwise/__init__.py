"""shardwise: any PyTorch module, any parallelism, proven equal to one process.

Names are loaded when first used, so `import shardwise` does not import torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

_HOME = {
    "Task": "shardwise.task",
    "Domain": "shardwise.task",
    "Source": "shardwise.dataset",
    "Plan": "shardwise.layout.plan",
    "Engine": "shardwise.engine.engine",
    "parallelize": "shardwise.engine.engine",
    "train": "shardwise.training.run",
    "prepare": "shardwise.scripts.prepared",
    "save": "shardwise.scripts.saved",
    "load": "shardwise.scripts.saved",
    "rollout": "shardwise.rollouts",
    "whole": "shardwise.parallel.domain",
    "verify": "shardwise.proof.parity",
    "verify_script": "shardwise.scripts.proof.verify_script",
    "Cluster": "shardwise.cluster.cluster",
    "plan": "shardwise.planner.door",
    "probe": "shardwise.measure.machine",
    "simulate": "shardwise.planner.door",
    "ShardwiseError": "shardwise.errors",
    "InputError": "shardwise.errors",
    "RefusedPlan": "shardwise.errors",
    "RunError": "shardwise.errors",
}
_ROOMS = ("data", "ranks")  # packages that are attributes, as in `shardwise.data.as_source`, without an import
__all__ = sorted(_HOME)
__version__ = "0.1.0"

if TYPE_CHECKING:
    from shardwise.cluster.cluster import Cluster
    from shardwise.dataset import Source
    from shardwise.engine.engine import Engine, parallelize
    from shardwise.errors import InputError, RefusedPlan, RunError, ShardwiseError
    from shardwise.layout.plan import Plan
    from shardwise.measure.machine import probe
    from shardwise.parallel.domain import whole
    from shardwise.planner.door import plan, simulate
    from shardwise.proof.parity import verify
    from shardwise.rollouts import rollout
    from shardwise.scripts.prepared import prepare
    from shardwise.scripts.proof.verify_script import verify_script
    from shardwise.scripts.saved import load, save
    from shardwise.task import Domain, Task
    from shardwise.training.run import train


def __getattr__(name: str):
    if name in _ROOMS:
        return importlib.import_module(f"shardwise.{name}")
    if name not in _HOME:
        from shardwise.errors import NoSuchName

        raise NoSuchName(f"module 'shardwise' has no attribute {name!r}{_of_what(name)}")
    import random

    kept = random.getstate()  # some imports use random numbers (rich, through torch), which must not change a script's
    try:
        return getattr(importlib.import_module(_HOME[name]), name)
    finally:
        random.setstate(kept)


def _of_what(name: str) -> str:
    """Returns a hint that `name` is an attribute of what `prepare` returns; "" if it is not."""
    prepared = sys.modules.get("shardwise.scripts.prepared")
    if prepared is None or not hasattr(prepared.Prepared, name):
        return ""
    line = sys.modules["shardwise.scripts.script_lines"].line_of_script()
    return f": it is of what prepare returns: prepared = model, optimizer, ... = prepare(...); prepared.{name} [{line}]"


def __dir__() -> list[str]:
    return __all__
