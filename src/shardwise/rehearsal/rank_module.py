"""Builds one rank's module on fake tensors: its shards, experts, chunks, recompute, in the order of engine/recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from shardwise.comm import Axis
from shardwise.memory.chunks import Chunks, chunked_forwards
from shardwise.memory.recompute import recompute_block
from shardwise.parallel.expert import ExpertParallel, install
from shardwise.parallel.expert.expert_forward import compute_own_rows
from shardwise.parallel.pipeline.boundaries import Stage, StagePlacement
from shardwise.parallel.pipeline.hooks import ResultHooks
from shardwise.parallel.pipeline.stage import StagedModule
from shardwise.parallel.tensor import TensorParallel
from shardwise.part.crossing import axes_of
from shardwise.part.parameters import see_parts
from shardwise.part.positions import Positions
from shardwise.precision import Precision
from shardwise.rehearsal.cut_module import CutRehearsal
from shardwise.rehearsal.step_trace import build
from shardwise.tiers import Activations, rehearsed
from shardwise.trace.blocks import Blocks, blocks_of
from shardwise.trace.fake import Fake


class _FakeStages(StagedModule):
    """`StagedModule` whose held and received tensors are fake tensors."""

    def _put(self, held: torch.Tensor, received: torch.Tensor, needs_gradient: bool, written: bool) -> None:
        """As `StagedModule._put`, but turns an unreduced sum over tp (`held`) into a fake tensor like `received`."""
        if isinstance(received, FakeTensor) and not isinstance(held, FakeTensor) and not axes_of(held):
            torch.utils.swap_tensors(held, torch.empty_like(received))
        super()._put(held, received, needs_gradient, written)


@dataclass
class RankModule:
    """Builds the module of one rank on tensors of the mode `fake`.

    shares     the task under its cuts, the same for all ranks
    tensor     the cuts of tp and this rank's index in it; None if tp=1
    experts    the modules whose experts ep deals ([] if ep=1), and this rank's index in ep
    positions  how the batch is cut over `inner`, the axes that cut positions; None if it is not
    """

    shares: CutRehearsal
    fake: Fake
    precision: Precision
    tensor: TensorParallel | None
    experts: ExpertParallel
    positions: Positions | None
    inner: tuple[Axis, ...]
    activations: Activations | None = None  # set by `build` if the plan moves activations
    result_hooks: ResultHooks | None = None  # set by `build`, before this package adds hooks

    def build(self, cut: StagePlacement | None) -> tuple[nn.Module, Blocks]:
        """Returns (module with this rank's shards, its blocks); `cut`: the stages as this rank has them, None if pp=1.

        Raises the refusals of a run.
        """
        model = build(self.shares.task, self.fake, self.precision)
        blocks = blocks_of(model, self.shares.plan.wrap, nested=self.shares.task.branches == "same")
        absent = cut.absent if cut is not None else set()
        self.result_hooks = ResultHooks(model)
        self._replace(model, absent)
        # a sequence that is made inside the forward is not in the batch, so it is cut where it is made
        if self.positions is not None and self.positions.inside is not None:
            self.positions.inside.install(model)
        if self.tensor is not None:
            see_parts(model, self.tensor.cuts, self.tensor.axis, absent, self.inner)
        elif self.inner:
            # weights are not sharded, but their gradients are summands over the ranks with other positions
            see_parts(model, {}, Axis.alone("tp"), absent, self.inner)
        stacks = self.experts.stacks
        if stacks:
            install(model, self.experts.here(absent), torch.device("cpu"))
        # every rank holds all experts, so their modules may compute on this rank's positions alone
        elif self.inner:
            stacks = self.shares.looks.row_wise(self.shares.plan)
            compute_own_rows(model, stacks)
        if cut is not None:
            blocks = cut.here(model, blocks)
        recomputed = self.shares.cuts.recompute != "none"
        if self.shares.cuts.position_chunks > 1:
            chunks = Chunks(self.shares.cuts.position_chunks)
            sending = [stack.path for stack in stacks]
            weights = self.shares.cuts.sharded.weights
            chunked_forwards(model, blocks.paths, chunks, weights, sending, recomputed=recomputed)
        if recomputed:
            # a block under two paths is wrapped once
            for block in {id(b): b for b in map(model.get_submodule, blocks.paths)}.values():
                recompute_block(block, self.shares.cuts.recompute)
        self.activations = rehearsed(model, blocks.paths, self.shares.cuts.moved)
        return model, blocks

    def staged(self, model: nn.Module, stages: list[Stage]) -> StagedModule:
        """Returns the wrapper that runs `stages` of a module that `build` made, one at a time."""
        assert self.result_hooks is not None, "`build` comes first"
        results = self.positions.results if self.positions is not None else {}
        return _FakeStages(model, stages, self.precision.compute, self.inner, results, self.result_hooks)

    def _replace(self, model: nn.Module, absent: set[str]) -> None:
        """Replaces cut weights by this rank's shards, and those of other stages (names in `absent`) by stand-ins."""
        names = {id(param): name for name, param in model.named_parameters()}
        made: dict[str, nn.Parameter] = {}
        for child in model.modules():
            for leaf, param in list(child._parameters.items()):
                if param is None:
                    continue
                name = names[id(param)]
                cut = self.tensor.cuts.get(name) if self.tensor is not None else None
                if name not in absent and cut is None and name not in self.experts.dealt:
                    continue
                # one stand-in for each parameter, so that tied weights stay tied
                if name not in made:
                    made[name] = self._stand_in(name, param, name in absent, cut)
                child._parameters[leaf] = made[name]

    def _stand_in(self, name: str, param: nn.Parameter, absent: bool, cut: Any) -> nn.Parameter:
        """Returns a fake parameter in the shape of this rank's shard, or in the full shape if it is `absent`.

        cut  how tp cuts the parameter; None if it does not
        """
        with self.fake:
            if absent:
                # `view_as_complex` needs a last dim of 2 that is contiguous, so that dim is not expanded
                lying = param.shape[-1:] if param.shape[-1:] == (2,) else ()
                # code of this stage may ask for the shape of another stage's weight, which takes no memory here
                value = torch.empty(lying, dtype=param.dtype).expand(param.shape)
                return nn.Parameter(value, requires_grad=False)
            shape = list(param.shape)
            if cut is not None:
                assert self.tensor is not None
                shape[cut.dim] = cut.owners.counts[self.tensor.axis.index]
            if name in self.experts.dealt:
                start, stop = self.experts.span(name, shape[0])
                shape[0] = stop - start
            share = nn.Parameter(torch.empty(shape, dtype=param.dtype), requires_grad=param.requires_grad)
        share.__dict__.update(param.__dict__)
        return share
