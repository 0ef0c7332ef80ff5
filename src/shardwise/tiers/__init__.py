"""Where a slot's optimizer state lies between steps: the host's memory, or a file on a disk (`offload=`).

What blocks keep for backward lies there within a step: activations.py. Shards of weights, between gathers: shards.py.

A tier is a place and nothing else: the tensors of `optimizer.state` stay what they are, and their memory is moved.
What rests in fewer bytes than it is stepped in (`optimizer_state=`, `masters=`) is coded on its way there: narrow.py,
and reads as its values meanwhile: resting.py.

    between steps   state, masters   ── lie in ──>  host memory, or the mapped file: whoever reads them, reads there
    in a step       sub-group by sub-group of parameters:

        disk  ── read ──> |buffer k+1|      one ahead
                          |buffer k  |  ──> optimizer.step over these parameters alone
        disk <── write ── |buffer k-1|      one behind

Which sub-groups there are follows from bytes (`subgroups`); their state is measured by a step on zeros before the
first one, so that a disk that is too small is found at start. The file has two halves: a step reads one and writes the
other, and only when all of it is written do the halves change places (`disk`).

Bytes on the disk in a step: the state and masters read once and written once; 2 x their size in the file.
Sources: Rajbhandari et al., "ZeRO-Infinity" (SC 2021); Ren et al., "ZeRO-Offload" (ATC 2021).

What this does not do: cut one parameter into several sub-groups (the largest one bounds the buffers), move masters
that are the module's own weights (fp32, zero=3) or their owners' (whole tensors under zero), move what an optimizer
first keeps after its first step, or hide the host's copies behind the device's steps.
"""

from shardwise.tiers.activations import Activations, rehearsed, spread, told_of_none
from shardwise.tiers.disk import StateFile
from shardwise.tiers.narrow import CODECS, HALVES, Draw
from shardwise.tiers.places import DeviceMemory, HostMemory, Place
from shardwise.tiers.resting import Resting
from shardwise.tiers.shards import ShardFile
from shardwise.tiers.state_tiers import StateTiers, kept_for, only
from shardwise.tiers.stores import ExtentFile, HostCopies, Nowhere, Store
from shardwise.tiers.subgroups import Subgroup, Unit
from shardwise.tiers.undo import Undo

__all__ = [
    "CODECS", "HALVES", "Activations", "DeviceMemory", "Draw", "ExtentFile", "HostCopies", "HostMemory", "Nowhere",
    "Place", "Resting", "ShardFile", "StateFile", "StateTiers", "Store", "Subgroup", "Undo", "Unit", "kept_for", "only",
    "rehearsed", "spread", "told_of_none",
]  # fmt: skip
