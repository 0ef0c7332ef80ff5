"""Where optimizer state is stored between steps: the interface, the host's memory, the device. The disk: disk.py."""

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
    """Whether the device has memory other than the host's, as an accelerator has."""
    return not on_host(device)


class Place:
    """Where sub-groups are stored between steps; sets `rest`, `after` and `buffer` of each `Subgroup`.

    These methods do nothing, which is right if state stays in its buffer. A disk's methods move bytes.
    """

    name = "device"

    def begin(self) -> None:
        """Called before a step."""

    def fetch(self, group: Subgroup) -> None:
        """Starts to copy a sub-group's stored state into its buffer."""

    def wait_for(self, group: Subgroup) -> None:
        """Waits until the buffer holds what `fetch` copies, and no write from it is under way."""

    def store(self, group: Subgroup) -> None:
        """Starts to copy the buffer to where the sub-group is stored after this step (`after`)."""

    def finish(self) -> None:
        """Waits for all copies; raises the first error."""

    def commit(self, groups: Sequence[Subgroup]) -> None:
        """Makes what this step stored the sub-groups' current state."""

    def abandon(self) -> None:
        """Waits for all copies, and ignores errors."""

    def close(self) -> None:
        """Ends threads and closes files."""


class HostMemory(Place):
    """The host's memory: a buffer for each sub-group, allocated once, pinned for an accelerator."""

    name = "host"

    def __init__(self, groups: Sequence[Subgroup], device: torch.device):
        for group in groups:
            group.rest = group.after = group.buffer = pinned(torch.empty(group.size, dtype=torch.uint8), device)


class DeviceMemory(Place):
    """The device's own memory, for coded state, of which a step decodes one sub-group at a time."""

    def __init__(self, groups: Sequence[Subgroup], device: torch.device):
        for group in groups:
            group.rest = group.after = group.buffer = torch.empty(group.size, dtype=torch.uint8, device=device)
