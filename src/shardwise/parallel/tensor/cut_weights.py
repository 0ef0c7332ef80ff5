"""Tensor parallelism: weights are sharded by derived cuts, and the module sees this rank's shares as whole weights.

    rank 0   x -> [Wq Wk Wv]_0 -> heads 0, 1 -> Wo_0 \\
                                                      all-reduce -> x + attention
    rank 1   x -> [Wq Wk Wv]_1 -> heads 2, 3 -> Wo_1 /

Equation: for y = f(x A) B with A cut by columns and B by rows, y = sum_r f(x A_r) B_r.
Bytes on the wire: one all-reduce of (B, S, H) in forward after every pair, and one in backward before it.
Bytes at rest: 1/N of the sharded weights, of their gradients and of their optimizer state.
Source: Shoeybi et al., "Megatron-LM" (2019), section 3.

The module's code runs unchanged, since reading `self.weight` gives a `Part` with the unsharded shape, and every
operation on it is exact (see `part`). The parameter itself is this rank's share, a plain tensor, so data parallelism,
recompute and the optimizer need no changes.

What this does not do: use one all-reduce in place of two in a block whose branches are added.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.comm import Axis, Gathering
from shardwise.parallel.slots import ValueOf
from shardwise.parallel.tensor.derive import Derived, WeightCut
from shardwise.part.gathering import rows_of, whole_of
from shardwise.part.parameters import IN_SHARES, see_parts

_ON_REAL = (
    "the forward reads values that it computes ({}), so rank 0 made every weight to find which are cut: "
    "for a moment it held the whole model"
)


@dataclass(frozen=True)
class TensorParallel:
    """The derived cuts of a module's weights over an axis (tp)."""

    derived: Derived
    axis: Axis

    @property
    def cuts(self) -> dict[str, WeightCut]:
        """Returns name of each sharded parameter -> its cut."""
        return self.derived.cuts

    def notices(self) -> list[str]:
        """Returns lines for the user on how many parameters are sharded, and whether rank 0 had to make all weights."""
        return [self._summary(), *([_ON_REAL.format(self.derived.needed_real)] if self.derived.needed_real else [])]

    def _summary(self) -> str:
        """Returns a sentence for the user on how many parameters are sharded, and which unevenly."""
        # shares that are gathered for each read save memory but no time, and the user expects both of tp
        if any(cut.role in IN_SHARES for cut in self.cuts.values()):
            return (
                f"tp={self.axis.size} finds no weight whose products ranks could share: each rank keeps its share of "
                f"{len(self.cuts)} parameters and gathers them to read, so memory is spared and every rank computes "
                "all; `shardwise show tp` lists them"
            )
        rows = [cut for cut in self.cuts.values() if cut.role != "beside"]
        uneven = sorted(cut.name for cut in rows if len(set(cut.owners.counts)) > 1)
        said = f"tp={self.axis.size} cuts {len(self.cuts)} parameters; `shardwise show tp` lists them"
        return said + (f" (unevenly: {', '.join(uneven[:3])}{', ...' if len(uneven) > 3 else ''})" if uneven else "")

    def share(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Returns this rank's share of a parameter from its unsharded value; `whole` itself if it is not sharded."""
        cut = self.cuts.get(name)
        return whole if cut is None else cut.owners.take(whole, cut.dim, self.axis.index)

    def local_values(self, value_of: ValueOf) -> ValueOf:
        """Returns a function from name to this rank's share of the initial value, from `value_of` for whole ones."""
        return lambda name: self.share(name, value_of(name))

    def whole(self, name: str, share: torch.Tensor | None) -> Gathering:
        """Returns the gathering of a parameter or gradient from every rank's share.

        Its result is `share` itself if that is None or the parameter is not sharded.
        """
        cut = self.cuts.get(name)
        if cut is None or share is None:
            return share
        # the cut dim is moved to the front and padded to the largest share, since an all-gather needs equal sizes
        front = rows_of(share.detach(), cut.dim, cut.owners)
        table = yield front.reshape(-1), self.axis
        return whole_of(table.view(-1, *front.shape[1:]), cut.dim, cut.owners)

    def full_shape(self, name: str, share: torch.Size) -> torch.Size:
        """Returns the unsharded shape of parameter `name`, from the shape of this rank's share."""
        cut = self.cuts.get(name)
        if cut is None:
            return share
        return torch.Size(cut.owners.size if dim == cut.dim else size for dim, size in enumerate(share))


def install(
    module: nn.Module, tensor: TensorParallel, absent: Collection[str] = (), summed: tuple[Axis, ...] = ()
) -> None:
    """Replaces sharded parameters by shares on the meta device, and lets the module's code read them as `Part`s.

    absent  names of parameters that no pipeline stage of this rank holds, which are not replaced
    summed  axes over which gradients stay summands (see `see_parts`)
    """
    names = {id(param): name for name, param in module.named_parameters()}
    shares: dict[str, nn.Parameter] = {}
    for child in list(module.modules()):
        for leaf, param in child._parameters.items():
            name = names.get(id(param)) if param is not None else None
            if param is None or name not in tensor.cuts or name in absent:
                continue
            if name not in shares:  # a tied weight stays one parameter
                shares[name] = _share(param, tensor.cuts[name], tensor.axis)
            child._parameters[leaf] = shares[name]
    see_parts(module, tensor.cuts, tensor.axis, absent, summed)


def _share(param: nn.Parameter, cut: WeightCut, axis: Axis) -> nn.Parameter:
    """Returns a parameter of this rank's share's shape, on the meta device, with the attributes of `param`."""
    shape = list(param.shape)
    shape[cut.dim] = cut.owners.counts[axis.index]
    share = nn.Parameter(torch.empty(shape, dtype=param.dtype, device="meta"), requires_grad=param.requires_grad)
    share.__dict__.update(param.__dict__)  # attributes that the module or the user has set on it
    return share
