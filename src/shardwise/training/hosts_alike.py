"""Checks before the first step of a launcher's ranks that hosts have the same code, plan, settings, data and folder."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.remote import is_remote, place
from shardwise.cluster import Cluster
from shardwise.comm import everybody, gather_json
from shardwise.digest import digest
from shardwise.errors import InputError
from shardwise.ranks import alike, here
from shardwise.training.job import Job
from shardwise.training.resume import settings_of

SEEN_S = 30.0  # seconds within which a file in a network folder must show on every host


def check_hosts(job: Job, device: torch.device) -> list[str]:
    """Compares versions, code, settings and data between hosts; returns notices on clocks and placement. Collective.

    device   for the collectives

    Raises `InputError` that names hosts that differ.
    """
    settings = {key: str(value) for key, value in settings_of(job.effective).items() if key != "array task"}
    rows = gather_json(alike.facts_here(settings | _data(job)), everybody(), device)
    alike.check_alike(rows)
    times = gather_json(alike.now(), everybody(), device)
    hosts = [row["host"] for row in rows]
    plan = job.effective.plan
    return [
        *alike.clock_notices(rows, times),
        *_renumbered(hosts),
        *alike.axis_notices(plan, hosts, _rates(job.effective.config.train.cluster)),
    ]


def _renumbered(hosts: list[str]) -> list[str]:
    """Returns [a notice] if ranks were renumbered host by host, else []; `hosts`: of each rank. Collective."""
    import torch.distributed as dist

    place = here()
    rank = dist.get_rank()
    moved = gather_moved(place is not None and place.rank != rank)
    if not moved:
        return []
    named = place.named if place is not None else "the launcher"
    return [
        f"{named} dealt ranks to {len(set(hosts))} hosts in turns: they are numbered anew, host by host, as plans are"
    ]


def gather_moved(moved: bool) -> bool:
    """Whether `moved` (its rank is not the launcher's) is True on any rank. Collective."""
    return any(gather_json(moved, everybody(), torch.device("cpu")))


def _rates(cluster: str | None) -> dict[str, tuple[float, float]]:
    """Returns {axis: (GB/s inside a node, GB/s between nodes)}; {} unless `cluster` has several nodes."""
    if cluster is None:
        return {}
    tiers = Cluster.parse(cluster).tiers
    if len(tiers) < 2:
        return {}
    from shardwise.layout.grid import AXES

    return dict.fromkeys(AXES, (tiers[0].gbps.value, tiers[1].gbps.value))


def _data(job: Job) -> dict[str, str]:
    """Returns facts on the data that hosts must have alike: {name: text}.

    They are the number of samples, and digests of the first and last one if reading it twice gives the same. {} for a
    task that makes its own batches, and for data of fields.
    """
    data = job.build_task().data
    if data is None or not len(data) or getattr(data, "global_shape", None) is not None:
        return {}  # a sample of a field may exceed a host's memory
    told = {"samples of the data": str(len(data))}
    for what, index in (("the first sample", 0), ("the last sample", len(data) - 1)):
        once, again = (_sample(data, index) for _ in range(2))
        if once == again:  # otherwise reading is random
            told[f"{what} of the data"] = once
    return told


def _sample(data: Any, index: int) -> str:
    """Returns a text that identifies a sample: digests of its tensors and other values, at most 200 characters."""
    from torch.utils._pytree import tree_leaves

    with _seeded():
        batch = data.read([index])
    return ",".join(digest(leaf) if isinstance(leaf, torch.Tensor) else str(leaf) for leaf in tree_leaves(batch))[:200]


@contextmanager
def _seeded() -> Iterator[None]:
    """Context in which torch's and Python's RNGs are seeded with 0; afterwards they are restored."""
    python, own = random.getstate(), torch.get_rng_state()
    random.seed(0)
    torch.manual_seed(0)
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(own)


def check_folder(job: Job, device: torch.device) -> None:
    """Raises `InputError` if a host does not see the folder of checkpoints that rank 0 sees. Collective."""
    config = job.effective.config.train
    if config.checkpoint_every == 0:
        return
    where: Path = job.folder
    if config.checkpoint_folder is not None:
        elsewhere = place(config.checkpoint_folder)
        if is_remote(elsewhere):  # a store that every host reaches by its address
            return
        where = Path(elsewhere)
        where.mkdir(parents=True, exist_ok=True)
    token = where / f".{job.folder.name}.hosts"
    rank = torch.distributed.get_rank()
    if rank == 0:
        token.touch()
    gather_json(0, everybody(), device)  # a barrier: the file exists now
    seen = gather_json(_sees(token), everybody(), device)
    if rank == 0:
        token.unlink(missing_ok=True)
    hosts = gather_json(os.uname().nodename, everybody(), device)
    if not all(seen):
        blind = list(dict.fromkeys(host for host, sees in zip(hosts, seen, strict=True) if not sees))
        raise InputError(
            f"{', '.join(blind)} has another {where} than rank 0's host {hosts[0]}, and ranks meet in the folder to "
            "save: give one that all hosts share (train.out or train.checkpoint_folder), or train.checkpoint_every=0"
        )


def _sees(token: Path) -> bool:
    """Whether this host sees rank 0's file within `SEEN_S` seconds."""
    until = time.monotonic() + SEEN_S
    while True:
        try:
            names = os.listdir(token.parent)  # makes a network file system refresh its cache
        except OSError:
            names = []
        if token.name in names:
            return True
        # a listing without the file may be cached too
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
