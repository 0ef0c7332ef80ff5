"""Offload (`offload=`): optimizer state lies in the host's memory, or in a file on a disk, between steps.

Tensors that blocks save for backward lie there within a step (activations.py), shards of weights between all-gathers
(shards.py).

The tensors of `optimizer.state` stay the same objects; only their memory is moved. State that is stored in fewer bytes
than it is updated in (`optimizer_state=`, `masters=`) is coded when it is stored (narrow.py). A coded tensor can be
read between steps as if it had its values (resting.py).

    between steps   state, masters   ── lie in ──>  host memory, or a mapped file, where anybody can read them
    in a step       sub-group by sub-group of parameters:

        disk  ── read ──> |buffer k+1|      one ahead
                          |buffer k  |  ──> optimizer.step over these parameters alone
        disk <── write ── |buffer k-1|      one behind

Sub-groups are formed by bytes (`subgroups`). The optimizer's state is found before the first step by a step on zeros,
so that a disk that is too small is refused at the start. The file has two halves. A step reads one and writes the
other, and the halves change roles only when everything is written (`disk`).

Bytes on the disk in a step: the state and masters read once and written once; 2 x their size in the file.
Sources: Rajbhandari et al., "ZeRO-Infinity" (SC 2021); Ren et al., "ZeRO-Offload" (ATC 2021).

What this does not do: split one parameter over several sub-groups (the largest one determines the buffers), move
masters that are the module's own weights (fp32, zero=3) or those of step/owners, move state that an optimizer creates
only after its first step, or overlap copies to the host with the device's steps.
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
