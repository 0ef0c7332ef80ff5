"""From a plan to a job of an engine: `job` (what runs where), a file for each engine, `rank_map`, `forecast`, `agent`.

    task, plan, nodes --> LaunchJob --> LaunchEngine.render --> {file name: text} --> the engine's own client

Rendering needs no engine to be installed. Nothing here schedules, watches a queue or starts a node again: that is the
engines' own work, and what they need for it (a requeue, a signal before the time limit, an exit code) is in the files.
"""

from __future__ import annotations
