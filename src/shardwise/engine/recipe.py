"""Apply a plan to a task's module, in order: build, shard, wrap blocks (recompute, compile), technique, weights."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from shardwise.comm.recording import refusing_others
from shardwise.comm.tree import FixedOrder
from shardwise.engine.materialise import (
    build_everywhere,
    empty_parameters,
    fill_buffers,
    fill_only,
    fill_parameters,
    hold_recurrent,
    noting_digests,
    told_of_drawn,
)
from shardwise.engine.module_spread import ModuleSpread, spread_module
from shardwise.engine.moved_activations import move_activations, refuse_without_blocks
from shardwise.engine.moved_parameters import lie_on_host, shards_elsewhere
from shardwise.engine.refused_modules import make_gradients_dense, own_collective, refuse, refuse_scripted, works_inside
from shardwise.errors import RefusedPlan, first_line
from shardwise.layout import Plan
from shardwise.layout.batch_pieces import BatchPieces
from shardwise.layout.zero_stages import PER_MICROBATCH, ZeroStage
from shardwise.look.memory_limits import check_masks, check_room
from shardwise.look.replaced_parameters import hold_replaced, may_replace
from shardwise.look.samples import IN_WHOLE, few_samples, has_samples, looked_at
from shardwise.memory.chunks import Chunks, chunked_forwards, given_values
from shardwise.memory.recompute import recompute_block
from shardwise.mesh import Mesh
from shardwise.parallel.expert import ExpertParallel, WithExperts
from shardwise.parallel.flat import Flat
from shardwise.parallel.full import FullShard
from shardwise.parallel.replicate import Replicate
from shardwise.parallel.slots import DataParallel, ValueOf
from shardwise.parallel.tensor import OPTIONS, TensorParallel, compile_block, why_eager
from shardwise.part.pairs import hold_pairs, pairs_in
from shardwise.part.positions import Positions
from shardwise.precision import Precision
from shardwise.task import Task
from shardwise.tiers import Activations, ShardFile
from shardwise.trace.blocks import Blocks, blocks_of
from shardwise.trace.conversions import refuse_conversions
from shardwise.trace.deferred import Built
from shardwise.trace.outside_reads import set_training
from shardwise.trace.stand_in import held_beside

if TYPE_CHECKING:
    from shardwise.parallel.pipeline.boundaries import StagePlacement
    from shardwise.parallel.pipeline.stage import StagedModule


@dataclass
class Applied:
    """The result of `apply_plan`: a module with its weights in place, and what owns and shards them.

    technique    data parallelism, which owns the weights' storage
    tensor       weights sharded over tp; experts: dealt over ep; positions: sharded dims of the batch
    notices      lines for the user; compiled blocks add some in the first step
    cut          the pipeline stages; staged: this rank's module, which runs its own stages
    trained      names of all parameters that require a gradient, on any stage; frozen: of those that do not
    order        fixed order of sums, under `deterministic`
    chunks       wide tensors computed in chunks of positions, under `position_chunks`
    marks        name of a parameter -> attributes that a user has set on it
    read         name of a frozen weight that comes from a file -> digest of its value
    activations  what moves blocks' saved tensors; shards: the file in which weights lie; both under `offload`
    A field is None if the plan has no such axis or option.
    """

    module: nn.Module
    technique: DataParallel
    tensor: TensorParallel | None = None
    experts: ExpertParallel | None = None
    positions: Positions | None = None
    notices: list[str] = field(default_factory=list)
    cut: StagePlacement | None = None
    staged: StagedModule | None = None
    trained: list[str] = field(default_factory=list)
    frozen: list[str] = field(default_factory=list)
    order: FixedOrder | None = None
    chunks: Chunks | None = None
    marks: dict[str, dict[str, Any]] = field(default_factory=dict)
    read: dict[str, str] = field(default_factory=dict)
    activations: Activations | None = None
    shards: ShardFile | None = None


def apply_plan(
    task: Task, plan: Plan, mesh: Mesh, precision: Precision, seed: int, few: Any = None, samples: int | None = None,
    enclosed: Collection[str] = (),
) -> Applied:  # fmt: skip
    """Returns the task's module with its weights in place, sharded as the plan says. Collective.

    few       batch of a few samples from which cuts are derived, the same on every rank; None: read from the task
    samples   number of samples in `few`, if not all of its tensors have a batch dim; None: taken from its tensors
    enclosed  paths of blocks that zero=3 does not make FSDP2 units, so that their parameters belong to the unit around
              them, and of parameters that it does not shard

    Raises `InputError` for a module that cannot be trained at all, `RefusedPlan` for one that this plan cannot run.
    """
    built, value_of = build_everywhere(task, seed, mesh.world, mesh.device, own=few is None)
    module = built.module
    hold_recurrent(module)  # before anything else runs it
    refuse_conversions(module)
    # before FSDP2 and masters replace the parameters, since an optimizer may read attributes that users set on them
    marks = {name: dict(param.__dict__) for name, param in module.named_parameters() if param.__dict__}
    few, notices = _made_fit(task, plan, mesh, precision, built, few)
    # a collective of the module's own would hang in a forward that rank 0 alone runs, to derive cuts for all
    with refusing_others(partial(own_collective, plan)):
        spread = spread_module(task, plan, mesh, precision, built, few, samples)
    notices += spread.notices()
    frozen = [name for name, param in module.named_parameters() if not param.requires_grad]
    read: dict[str, str] = {}
    if not _get_current_dispatch_mode_stack():  # a rehearsal reads nothing
        value_of = noting_digests(value_of, built.stored() & {*frozen}, read)
    value_of = spread.local_values(value_of)
    # if ranks may take different branches, a block inside a block would be a unit that some ranks do not gather
    nested = task.branches == "same"
    blocks = blocks_of(module, plan.wrap, nested=nested)
    trained = [name for name, _ in trainable(module)]
    cut = _cut_stages(task, plan, mesh, precision, built, blocks, spread)
    absent: set[str] = set()
    if cut is not None:
        from shardwise.parallel.pipeline.hooks import ResultHooks

        result_hooks = ResultHooks(module)
        absent, value_of = cut.absent, cut.values(built, value_of)
        notices += cut.notices
    spread.install(module, absent, mesh, traced=plan.compile)
    refuse_without_blocks(plan, blocks)
    notices += _without_effect(blocks, plan)  # of all stages' blocks: one stage may hold none
    blocks = blocks if cut is None else cut.here(module, blocks)
    if not _get_current_dispatch_mode_stack():  # a rehearsal makes nothing
        _check_memory(module, plan, mesh, precision, absent, spread.positions)
    chunks = _in_chunks(module, blocks, plan, spread)
    _prepare(module, blocks, plan, notices)
    activations = move_activations(module, blocks, plan, mesh, notices)
    order = _fixed_order(plan, mesh)
    moved: ShardFile | None = None
    if plan.sharded.weights:
        notices += blocks.warnings
        # experts in a list are dealt, and nothing of them is gathered
        listed = {member for stack in spread.stacks for member in stack.members}
        units = [path for path in blocks.paths if path not in enclosed and path not in listed]
        # Not sharded: parameters that the forward writes, and those that modules keep in lists or objects of their
        # own, where FSDP2 would not put the gathered weight.
        kept = {name for name, _ in module.named_parameters() if name in enclosed} | held_beside(module)
        kept -= absent
        technique, moved = _full_shard(
            module, units, value_of, mesh, precision, absent, frozen, spread.experts, order, kept,
            shards_elsewhere(plan, mesh, notices), host=lie_on_host(plan, mesh.device),
        )  # fmt: skip
        # FSDP2's hooks read a unit's arguments, which a product in chunks may not have computed yet
        given_values(map(module.get_submodule, units) if chunks is not None else ())
    else:
        technique = _whole_module(module, plan, mesh, precision, spread.experts, absent, order, value_of)
    fill_buffers(module, value_of, precision, mesh.device)
    staged = None
    if cut is not None:
        from shardwise.parallel.pipeline.stage import StagedModule

        staged = StagedModule(module, cut.mine, precision.compute, mesh.inner, spread.results, result_hooks)
    return Applied(
        set_training(module, True), technique, spread.tensor, spread.experts, spread.positions, notices, cut, staged,
        trained, frozen, order, chunks, marks, read, activations, moved,
    )  # fmt: skip


def _made_fit(
    task: Task, plan: Plan, mesh: Mesh, precision: Precision, built: Built, few: Any
) -> tuple[Any, list[str]]:
    """Changes the module into one that plans can run; returns (`few`, read from the task if needed; notices).

    Parameters that a forward replaces become buffers, complex parameters real ones with a last dim of 2, and sparse
    gradients dense. Returns None for `few` if nobody needs it. Collective.
    """
    module = built.module
    notices = [built.notice] if built.notice else told_of_drawn(built)
    refuse(module, plan)
    refuse_scripted(module, plan)
    # A cheap look at the code's names; whether a forward does replace parameters, `hold_replaced` finds by running it.
    replaces = may_replace(module) and (few is not None or has_samples(task))
    if few is None and (plan.tp > 1 or plan.ep > 1 or mesh.inner or replaces):
        few = few_samples(task, plan, mesh.world, mesh.device)
        few = looked_at(few, plan, plan.data_ranks, IN_WHOLE in mesh.found)
    notices += hold_replaced(task, precision, built, few) if replaces else []
    # Before cuts are derived, since shards and messages hold real numbers.
    built.pairs = hold_pairs(module) if works_inside(plan) else pairs_in(module)
    notices += _other_dtypes(module, plan, precision)
    make_gradients_dense(module)
    return few, notices


def _cut_stages(
    task: Task, plan: Plan, mesh: Mesh, precision: Precision, built: Built, blocks: Blocks, spread: ModuleSpread
) -> StagePlacement | None:
    """Returns the pipeline stages, none of which begins inside a module of experts; None without pp. Collective."""
    if plan.pp <= 1:
        return None
    from shardwise.engine.cutting import cut_module

    inseparable = [stack.path for stack in spread.stacks]
    with refusing_others(partial(own_collective, plan)):
        return cut_module(task, plan, mesh, precision, built, blocks, inseparable)


def _in_chunks(module: nn.Module, blocks: Blocks, plan: Plan, spread: ModuleSpread) -> Chunks | None:
    """Makes the blocks compute wide tensors in chunks of positions; returns counters of that, None if not asked for."""
    if plan.position_chunks <= 1:
        return None
    chunks = Chunks(plan.position_chunks)
    stacks = spread.experts.stacks if spread.experts is not None else spread.row_wise
    # Called before recompute and compile, which wrap the forwards as they are then. Experts exchange tokens with other
    # ranks, so they are given computed tensors.
    sending = [stack.path for stack in stacks]
    chunked_forwards(module, blocks.paths, chunks, plan.sharded.weights, sending, recomputed=plan.remat != "none")
    return chunks


def _fixed_order(plan: Plan, mesh: Mesh) -> FixedOrder | None:
    """Returns the order of sums over pieces of a batch, under `deterministic`; else None."""
    if not plan.deterministic:
        return None
    return FixedOrder(BatchPieces(plan.deterministic, plan.accumulate, plan.data_ranks), mesh.data)


def trainable(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Returns (name, parameter) of each parameter that requires a gradient, a tied one once."""
    return [(name, param) for name, param in module.named_parameters() if param.requires_grad]


def _other_dtypes(module: nn.Module, plan: Plan, precision: Precision) -> list[str]:
    """Returns a notice for each dtype of parameters, but float32, that the plan replaces by its masters' dtype."""
    numbers = (param.dtype for param in module.parameters() if param.is_floating_point() or param.is_complex())
    built = {dtype.to_real() for dtype in numbers}
    return [
        f"parameters built in {dtype} are held in {precision.master}, as precision={plan.precision} says"
        for dtype in sorted(built - {precision.master, torch.float32}, key=str)
    ]


def _prepare(module: nn.Module, blocks: Blocks, plan: Plan, notices: list[str]) -> None:
    """Wraps the forward of each block for recompute and compile, as the plan says.

    If weights or positions are sharded, recompute wraps the compiled forward; else it is compiled too.

    notices  gets a line on blocks that stay uncompiled; compiled blocks may add to it in the first step
    """
    eager: dict[str, str] = {}
    cut = plan.tp > 1 or plan.cut_positions > 1
    # A block under two paths is wrapped once, by the first.
    paths = {id(module.get_submodule(path)): path for path in reversed(blocks.paths)}
    for path in paths.values():
        block = module.get_submodule(path)
        if plan.compile and cut:
            reason = _compile_cut(block, path, blocks, notices)
            eager |= {path: reason} if reason else {}
        if plan.remat != "none":
            recompute_block(block, plan.remat)
        if plan.compile and not cut:
            block.forward = _compiled(block, path)
    for path in list(eager)[:1]:
        notices.append(f"compile leaves {len(eager)} of {len(paths)} blocks as they are: '{path}': {eager[path]}")


def _compiled(block: nn.Module, path: str) -> Callable[..., Any]:
    """Returns the compiled forward of a block, which runs uncompiled while a dispatch mode is on.

    If the compiler fails on dynamic sizes (blocks on several grids), the forward is compiled once more, for each size.
    It raises `RefusedPlan` if that fails too. `path`: of the block, for the message.
    """
    forward = block.forward
    ways = [torch.compile(forward, options=OPTIONS, dynamic=dynamic) for dynamic in (None, False)]

    def run(*args: Any, **kwargs: Any) -> Any:
        # under a mode (the look at a few samples) the compiler would skip the block, then and in all later calls
        if _get_current_dispatch_mode_stack():
            return forward(*args, **kwargs)
        written = [buffer._version for buffer in block.buffers()]
        try:
            return ways[0](*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            # once more, with fixed sizes, unless a buffer was written: a second run would write it again
            if len(ways) == 1 or written != [buffer._version for buffer in block.buffers()]:
                told = f"torch's compiler fails on '{path}': {first_line(error)}: leave compile=true out"
                raise RefusedPlan(told) from error
            del ways[0]
        return run(*args, **kwargs)

    return run


def _compile_cut(block: nn.Module, path: str, blocks: Blocks, notices: list[str]) -> str:
    """Compiles a block for shards of weights or positions; returns why it stays uncompiled, "" if it is compiled."""
    if any(other.startswith(f"{path}.") for other in blocks.paths):
        return "there are blocks inside it, which are compiled"
    reason = why_eager(block)
    if not reason:
        compile_block(block, path, notices)
    return reason


def _without_effect(blocks: Blocks, plan: Plan) -> list[str]:
    """Returns a notice for each option of the plan that acts on blocks (remat, compile), if the module has none."""
    asked = {"remat": plan.remat != "none", "compile": plan.compile}
    return [
        f"{name} has no effect: no repeated blocks were found in the module"
        for name, wanted in asked.items()
        if wanted and not blocks.paths
    ]


def _check_memory(
    module: nn.Module, plan: Plan, mesh: Mesh, precision: Precision, absent: set[str], positions: Positions | None
) -> None:
    """Raises, before anything is allocated, if weights or attention masks do not fit into the device's memory."""
    check_room(module, plan, mesh, precision, absent)
    if positions is not None:
        check_masks(positions, mesh.device, mesh.world.size)


def _full_shard(
    module: nn.Module, paths: list[str], value_of: ValueOf, mesh: Mesh, precision: Precision, absent: set[str],
    frozen: list[str], experts: ExpertParallel | None, order: FixedOrder | None, kept: set[str],
    elsewhere: Callable[[list[list[torch.Tensor]]], ShardFile | None] | None, *, host: bool,
) -> tuple[DataParallel, ShardFile | None]:  # fmt: skip
    """Returns (the technique of zero=3, the file in which its shards lie or None if they lie in memory).

    paths      of the FSDP2 units
    absent     names of parameters that only other pipeline stages hold;  frozen  of those without a gradient
    experts    dealt over ep; they and the parameters `kept` are not sharded by FSDP2
    elsewhere  function that puts shards into a file (`shards_elsewhere`), or None
    host       whether shards lie in the host's memory
    """
    spread = set(experts.dealt) - absent if experts is not None else set()
    other = absent | spread | kept
    empty_parameters(module, precision, mesh.device, other)
    units = [module.get_submodule(path) for path in paths]
    sharded = FullShard(module, units, mesh, precision, other, order, elsewhere, host)
    sharded.materialise(value_of, mesh.device)
    sharded.make_slots()
    technique: DataParallel = sharded
    fill_only(module, spread | kept, frozen, value_of, precision.compute, mesh.device)
    if kept:
        named = [(name, param) for name, param in trainable(module) if name not in spread]
        # Their gradients and optimizer state are sharded all the same, as under zero=2.
        whole = Flat([pair for pair in named if pair[0] in kept], mesh.shard, mesh.replicate, precision,
                     stage=PER_MICROBATCH, order=order, pairs=pairs_in(module))  # fmt: skip
        technique = WithExperts([name for name, _ in named], technique, whole, kept, None)
    if spread:
        technique = _with_experts(module, technique, spread, mesh, precision, stage=PER_MICROBATCH)
    for index, (name, _) in enumerate(trainable(module)):
        if precision.mixed and name in spread | kept:  # FSDP2 has its own masters already
            technique.load_masters(index, value_of(name).to(mesh.device))
    assert isinstance(sharded.moved, ShardFile | None)  # what `elsewhere` gave
    return technique, sharded.moved


def _whole_module(
    module: nn.Module, plan: Plan, mesh: Mesh, precision: Precision, experts: ExpertParallel | None, absent: set[str],
    order: FixedOrder | None, value_of: ValueOf,
) -> DataParallel:  # fmt: skip
    """Gives the module unsharded weights (experts: this rank's), and returns the technique that owns them.

    That is replicas, or flat pieces under zero=1 and 2. absent: names of parameters that only other stages hold.
    """
    fill_parameters(module, value_of, precision.compute, mesh.device, absent)
    spread = set(experts.dealt) - absent if experts is not None else set()
    named = [(name, param) for name, param in trainable(module) if name not in spread]
    pairs = pairs_in(module)
    technique: DataParallel
    if plan.sharded.state:
        technique = Flat(named, mesh.shard, mesh.replicate, precision, stage=plan.sharded, order=order, pairs=pairs)
    else:
        technique = Replicate(named, mesh.gradients, precision, order, pairs)
    if spread:
        technique = _with_experts(module, technique, spread, mesh, precision, stage=plan.sharded)
    if precision.mixed:  # masters are set from the initial values, since the module's weights are rounded
        for index, (name, _) in enumerate(trainable(module)):
            technique.load_masters(index, value_of(name).to(mesh.device))
    return technique


def _with_experts(
    module: nn.Module, rest: DataParallel, spread: set[str], mesh: Mesh, precision: Precision, *, stage: ZeroStage
) -> WithExperts:
    """Returns a technique that combines `rest` with one for the experts' weights named in `spread`.

    The latter reduces over the ranks that hold the same experts only. stage: what ZeRO shards of them.
    """
    named = [(name, param) for name, param in trainable(module) if name in spread]
    pairs = pairs_in(module)
    technique: DataParallel
    if stage.state and mesh.expert_shard.size > 1:
        technique = Flat(named, mesh.expert_shard, mesh.replicate, precision, stage=stage, pairs=pairs)
    else:  # one rank of dp_shard alone holds them, or all that do keep everything
        technique = Replicate(named, mesh.expert_data, precision, pairs=pairs)
    ranks = (mesh.shard.index, mesh.expert_shard.index)
    return WithExperts([name for name, _ in trainable(module)], rest, technique, spread, ranks)
