"""What a tier's place does for a step, and the host's memory as one. The disk: disk.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.device import on_host, pinned
from shardwise.tiers.subgroups import Subgroup

IN_MEMORY = (
    "the device of this rank is its processor, whose memory is the host's, so that nothing is gained: use "
    "offload={}:disk, or leave it out"
)


def has_own_memory(device: torch.device) -> bool:
    """Whether the host's memory is another than the device's."""
    return not on_host(device)


class Place:
    """Where sub-groups lie between steps. Each has `rest` there, and a `buffer` in the host's memory within a step.

    Its methods do nothing: where what rests lies in the buffer, or nothing does, nothing moves. A disk's move bytes.
    """

    name = "device"

    def begin(self) -> None:
        """Called before a step."""

    def fetch(self, group: Subgroup) -> None:
        """Start to bring what rests of a sub-group into its buffer."""

    def wait_for(self, group: Subgroup) -> None:
        """Wait until the buffer holds what was fetched, and nothing of another sub-group that is still written."""

    def store(self, group: Subgroup) -> None:
        """Start to put the buffer where the sub-group rests after this step."""

    def finish(self) -> None:
        """Wait for all that was started."""

    def commit(self, groups: Sequence[Subgroup]) -> None:
        """From now on the sub-groups rest where this step put them."""

    def abandon(self) -> None:
        """Wait for all that was started, whatever came of it."""

    def close(self) -> None:
        """End what runs beside the steps."""


class HostMemory(Place):
    """The host's memory: a buffer for each sub-group, allocated once, pinned where the device copies from it."""

    name = "host"

    def __init__(self, groups: Sequence[Subgroup], device: torch.device):
        for group in groups:
            group.rest = group.after = group.buffer = pinned(torch.empty(group.size, dtype=torch.uint8), device)


class DeviceMemory(Place):
    """The memory of the device itself, for state that rests by a code: a step decodes a sub-group of it at a time."""

    def __init__(self, groups: Sequence[Subgroup], device: torch.device):
        for group in groups:
            group.rest = group.after = group.buffer = torch.empty(group.size, dtype=torch.uint8, device=device)
