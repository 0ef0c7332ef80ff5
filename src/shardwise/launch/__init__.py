"""Makes job files of an engine (Slurm, Kubernetes, ...) from a plan, and submits them with the engine's client.

    task, plan, nodes --> LaunchJob --> LaunchEngine.render --> {file name: text} --> the engine's own client

Rendering needs no installed engine. Nothing here schedules, watches a queue or restarts a node: engines do that, and
the files have what they need for it (a requeue, a signal before the time limit, an exit code).
"""

from __future__ import annotations
