"""One rank's module without values: shares put in, blocks recomputed, in the same order as engine/recipe."""

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
    """Stages on fake tensors."""

    def _put(self, held: torch.Tensor, received: torch.Tensor, needs_gradient: bool, written: bool) -> None:
        """As in `StagedModule`; a sum over tp becomes a fake tensor first, as what takes its place is one."""
        if isinstance(received, FakeTensor) and not isinstance(held, FakeTensor) and not axes_of(held):
            torch.utils.swap_tensors(held, torch.empty_like(received))
        super()._put(held, received, needs_gradient, written)


@dataclass
class RankModule:
    """Builds the module of one rank.

    shares     how the plan cuts the task's module, the same for all ranks
    tensor     this rank's place in tp; None without
    experts    the modules of experts, and its place in ep
    positions  how the batch is cut over `inner`, its axes that cut positions
    """

    shares: CutRehearsal
    fake: Fake
    precision: Precision
    tensor: TensorParallel | None
    experts: ExpertParallel
    positions: Positions | None
    inner: tuple[Axis, ...]
    activations: Activations | None = None  # of the module that was built, where the plan moves them
    result_hooks: ResultHooks | None = None  # of the module that was built, before hooks of this package are on it

    def build(self, cut: StagePlacement | None) -> tuple[nn.Module, Blocks]:
        """Returns (module, its blocks) with this rank's shares, techniques in a run's order; refuses as a run does."""
        model = build(self.shares.task, self.fake, self.precision)
        blocks = blocks_of(model, self.shares.plan.wrap, nested=self.shares.task.branches == "same")
        absent = cut.absent if cut is not None else set()
        self.result_hooks = ResultHooks(model)
        self._replace(model, absent)
        # a sequence that is made inside the forward has no place in the batch at which it could be cut
        if self.positions is not None and self.positions.inside is not None:
            self.positions.inside.install(model)
        if self.tensor is not None:
            see_parts(model, self.tensor.cuts, self.tensor.axis, absent, self.inner)
        elif self.inner:
            # weights are whole, and their gradients summands over ranks with other positions
            see_parts(model, {}, Axis.alone("tp"), absent, self.inner)
        stacks = self.experts.stacks
        if stacks:
            install(model, self.experts.here(absent), torch.device("cpu"))
        # every rank holds all experts: their modules compute on this rank's positions alone
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
        """Returns the module as it runs these stages."""
        assert self.result_hooks is not None, "`build` comes first"
        results = self.positions.results if self.positions is not None else {}
        return _FakeStages(model, stages, self.precision.compute, self.inner, results, self.result_hooks)

    def _replace(self, model: nn.Module, absent: set[str]) -> None:
        """Replace cut weights by this rank's shares, and those of other stages by shapes without memory."""
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
        """Returns a parameter without values of this rank's share's shape; of an `absent` one, of the whole shape."""
        with self.fake:
            if absent:
                lying = param.shape[-1:] if param.shape[-1:] == (2,) else ()  # `view_as_complex` asks for it
                # the shape without its memory: code of this stage may ask for it, and the values are another's
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
