"""`prepare(model, optimizer, loader, plan=...)` and `Prepared`, after stepping, over_ranks, weight_access and calls.

    batch of the script, cut        forward, loss: the script's own         prepared.backward(loss, weight)
    rank 0   samples 0..3  ------>  S_0, w_0  --------------------->  sum over ranks of dS_r, divided once by
    rank 1   samples 4..7  ------>  S_1, w_1  --------------------->  the sum of the w_r; then optimizer.step()

Everything below the loop is the engine: techniques, normalisation, the trial of the optimizer, batch norm over ranks.

What this does not do: find out whether the script is right on ranks. `shardwise verify` runs it on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.checkpoint.optimizers import options_of
from shardwise.comm import gather_json
from shardwise.device import accelerator, on_host
from shardwise.engine.engine import Engine
from shardwise.engine.optimizer import Nature, refuse
from shardwise.engine.recipe import trainable
from shardwise.engine.tiers import make_tier
from shardwise.errors import InputError
from shardwise.layout import Plan
from shardwise.layout.zero_stages import UNSHARDED
from shardwise.mesh import build_mesh
from shardwise.parallel.full import FullShard
from shardwise.part.dispatch import Gathers
from shardwise.part.parameters import read_outside
from shardwise.random import Randomness
from shardwise.ranks.process import leave_where_imported
from shardwise.scripts import script_optimizer as optimizers
from shardwise.scripts.agreement import Meeting, same_given
from shardwise.scripts.calls import Calls, leader_of
from shardwise.scripts.dealt import OwnBatches
from shardwise.scripts.entries import as_given, as_one
from shardwise.scripts.gradient_arrivals import Asking, buckets_of
from shardwise.scripts.gradients import Gradients
from shardwise.scripts.guard import FirstSteps, Gate, guard_conversion, mark_like, refuse_hooks, refuse_replaced
from shardwise.scripts.joint_optimizer import as_one_optimizer, optimizer_as_given
from shardwise.scripts.part_loader import Events, PartLoader, Reads
from shardwise.scripts.proof.on_ranks import side_of, watched
from shardwise.scripts.proof.plain import Plain
from shardwise.scripts.proof.receipts import line_of, script_under_way
from shardwise.scripts.proof.recorder import recorder
from shardwise.scripts.reading import IMPORTED
from shardwise.scripts.script_lines import names_line
from shardwise.scripts.script_profile import asked_profile
from shardwise.scripts.script_weights import OptimizerGuard, ScriptWeights
from shardwise.scripts.spread import check_cuts, on_common_axes, shared_call, thawed, wait_for_call
from shardwise.scripts.start import (
    ON_THE_HOST,
    check_given,
    check_kinds,
    device_of,
    generators_kept,
    is_compiled,
    join_ranks,
    make_engine,
    waits_for_call,
    with_dtype,
)
from shardwise.scripts.stepping import Stepping
from shardwise.scripts.weight_access import Copies, hold
from shardwise.scripts.whole_optimizer_state import States, holds_pieces, open_doors, put, states_of
from shardwise.scripts.whole_weights import WholeWeights
from shardwise.step.state import RankState
from shardwise.task import Domain
from shardwise.tiers import StateTiers

_PREPARED: WeakSet[nn.Module] = WeakSet()  # models that a plan has changed in place
_NO_LOADER: Any = object()  # left out: unpacks into two; None is given: into three


@names_line
def prepare(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer],
    loader: Any = _NO_LOADER,
    *more: Any,
    plan: Plan | str = "single",
    randomness: Randomness = "global",
    branches: Literal["same", "per_sample"] = "same",
    reads: Reads = "auto",
    batch_dim: int | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    check_loss: bool = True,
    spatial: Domain | None = None,
    loss_scope: Literal["sample", "global", "model"] = "sample",
    thaws: bool = False,
) -> Prepared:
    """Spreads a script's model, optimizer and loader over the ranks of this run, as the plan says. Collective.

    model       built, with its weights; rank 0's are sent to ranks that have others. Changed in place. Or several that
                one optimizer trains, as a tuple: (encoder, head)
    optimizer   made from the model's parameters, before its first step. Changed in place. Or a list: [muon, adam]
    loader      the one that one process would use; a batch of it is a global micro-batch. None, or left out: the script
                makes its batches itself (`deal`, or another loss_scope than "sample")
    plan        any but pipelines; accumulate is the calls of `backward` in one step. What tp, ep, cp, cp_ulysses and
                domain cut is derived in the model's first forward in training
    randomness  "global": noise and masks for samples are those of one process; "fast": each rank draws its own
    branches    "same": samples use the same parameters; "per_sample": each may use others, as in `Task`
    reads       "part": a rank reads its samples alone; "whole": all of a batch, of which it keeps its part; "auto": the
                part, but under "global" all if the loader has its own collate function or its dataset draws randomly
    batch_dim   the dim of a batch's tensors that counts its samples (None: 0); of tensors with fewer dims, the first
    seed        of the random numbers under "fast"
    device      where the plan holds the model; None: the CPU for a model that lies there, else this rank's accelerator
    check_loss  Whether to check on a few samples of the first batch that the model does not mix samples
    spatial     which dims of the model's arguments are space, under domain; None: those behind batch and channel
    loss_scope  "sample": the loss adds up over samples, which ranks take parts of. "global": it does not (dice of a
                batch, a contrastive pair, mixup): every rank reads whole batches, the model runs on its samples, and
                its outputs are gathered for the loss. "model": the model mixes samples as well (a queue in its forward,
                one whole graph): every rank runs it on whole batches, and the plan spreads memory alone
    thaws       Whether frozen parameters are in the plan too, with memory for gradients, and may be trained later

    Returns a `Prepared`, which unpacks into as many as were given:

        prepared = model, optimizer, loader = shardwise.prepare(model, optimizer, loader, plan="dp_shard=8,zero=3")
        prepared = model, optimizer = shardwise.prepare(model, optimizer, plan="dp_shard=8,zero=3")

    Raises `InputError` for what cannot be prepared or a wrong number of ranks, `RefusedPlan` for a plan that a
    script's own loop cannot follow.
    """
    if more and isinstance(more[0], str | Mapping | Plan):
        raise InputError(f"prepare takes the plan by its name: prepare(model, optimizer, loader, plan={more[0]!r})")
    if more:
        raise InputError(
            f"prepare takes (model, optimizer, loader), and is given a {type(more[0]).__name__} too: leave it out: a "
            "scheduler goes on with its optimizer, another loader is prepared.split(loader)"
        )
    leave_where_imported(f"shardwise: {IMPORTED}\n")
    proof = recorder()
    plan = Plan.parse(plan) if proof is None else proof.plan_for(Plan.parse(plan))
    _refuse_twice(model)
    unpacks, loader = (2, None) if loader is _NO_LOADER else (3, loader)
    check_kinds(as_one(model), as_one_optimizer(optimizer))
    if proof is not None and proof.job.plain:  # the one process of a proof, which only records
        return Plain(model, optimizer, loader, plan, proof, dim=batch_dim, unpacks=unpacks)  # type: ignore[return-value]
    loss_scope = (proof and proof.job.scope) or loss_scope  # type: ignore[assignment]  # its: a remedy that is tried
    model, optimizer = as_one(model), as_one_optimizer(optimizer)
    check_given(model, optimizer, plan, randomness, loss_scope)
    join_ranks(plan)
    options = PrepareOptions(
        plan, randomness, branches, reads, batch_dim, seed, device_of(model, device), check_loss, spatial, loss_scope,
        thaws, unpacks,
    )  # fmt: skip
    with torch.device("cpu"):  # not torch's default: what is made here says where it lies
        prepared = Prepared(model, optimizer, loader, options)
    if device is None and on_host(prepared.mesh.device) and accelerator() is not None:
        prepared._notices.say([ON_THE_HOST])
    if proof is None and prepared.mesh.world.size > 1 and (script := script_under_way()) is not None:
        prepared._notices.say([line_of(script, plan)])  # whether it was proven under this plan
    _PREPARED.add(model)
    return prepared


def _refuse_twice(model: Any) -> None:
    """Raises `InputError` if `prepare` has changed this model before."""
    if isinstance(model, nn.Module) and model in _PREPARED:
        raise InputError(
            f"prepare: this model ({type(model).__name__}) was prepared before, and two plans would sum its gradients "
            "twice: call prepare once for each model; of a model with parts that have optimizers of their own, prepare "
            "each part with its own"
        )


@dataclass(frozen=True)
class PrepareOptions:
    """The arguments of `prepare` besides model, optimizer and loader; see there."""

    plan: Plan
    randomness: Randomness
    branches: Literal["same", "per_sample"]
    reads: Reads
    batch_dim: int | None
    seed: int
    device: torch.device
    check_loss: bool
    spatial: Domain | None  # as Task.spatial
    loss_scope: Literal["sample", "global", "model"]
    thaws: bool
    unpacks: int  # how many objects `Prepared` unpacks into, 2 or 3


class Prepared(Stepping):
    """A script's model, optimizer and loader on this rank. Made by `prepare`; unpacks into what was given to it."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, loader: Any, options: PrepareOptions) -> None:
        self.plan = plan = with_dtype(options.plan, model)
        self.model, self._options = model, options
        self._copied_from: Engine | None = None
        self._whole_weights: WholeWeights | None = None
        self._copies = Copies(model, self)
        self.mesh = on_common_axes(build_mesh(plan, options.device))
        self.seed = options.seed
        named = [*model.named_parameters()] if options.thaws else trainable(model)
        self._shapes = {name: p.shape for name, p in named if p.is_floating_point() or p.is_complex()}
        self._kinds = {name: (param.shape, param.is_complex()) for name, param in named}
        self._shares = plan.tp > 1 or plan.ep > 1
        self._take(optimizer)
        scope, randomness = options.loss_scope, options.randomness
        leader = leader_of(loader, self.mesh, randomness, scope)
        self.calls = Calls(model, self.mesh, randomness, self.seed, leader, check=options.check_loss, loss_scope=scope)
        # "fast" gives up the draws of one process, those of reading too: nothing to watch for
        self._reads: Reads = "part" if options.reads == "auto" and randomness == "fast" else options.reads
        self.loader = self._cut(loader, self.calls, self._reads) if leader is None else loader
        self._own_batches = self.loader if self.loader.is_pushed else None  # deals those that the script makes
        if loader is None:
            self.calls.begin_unfed()
        self._begin()
        self._engine: Engine | None = None
        self.gradients, self._settles = None, False
        self._gate, self._state_gate = Gate(), Gate()
        self._notices = self.calls.notices
        world = self.mesh.world
        self._pieces = holds_pieces(plan) and world.size > 1
        self.meeting = Meeting(world, options.device) if world.size > 1 else None
        self.pending: Path | None = None  # a checkpoint that is loaded once the weights are in place
        open_doors(self)
        self.side = side_of(self, loader, recorder())
        if leader is None:  # else the first model's loader, which tells of batches already
            self.loader.recorder = recorder()
        if waits_for_call(plan):
            wait_for_call(model, self._spread)
        else:
            self._spread()

    def _take(self, optimizer: Optimizer) -> None:
        """Makes `optimizer` the script's: notes parameter names, tries out on which pieces it can run."""
        optimizers.refuse_lost(optimizer, self.plan)
        self.optimizer = optimizer
        self.all_names, self._groups, self._nature = self._known(optimizer.param_groups)
        refuse(self._nature, UNSHARDED, self.plan.tp, self.plan.ep, named=type(optimizer).__name__)

    def _known(self, groups: list[dict[str, Any]]) -> tuple[list[list[str]], list[list[str]], Nature]:
        """Returns (names by group, of these the plan's trained ones, the update's `Nature`); may raise `InputError`."""
        names = optimizers.names_in_groups(groups, self.model)
        optimizers.refuse_thawed(groups, names, self._shapes)
        trained = [[name for name in group if name in self._shapes] for group in names]
        with generators_kept():
            kinds = [[self._kinds[name] for name in group] for group in trained]
            return names, trained, optimizers.nature_of(self.optimizer, groups, kinds)

    @names_line
    def _add_group(self, group: dict[str, Any]) -> None:
        """Stands for `optimizer.add_param_group`; `InputError` if these settings need more than this rank's pieces."""
        optimizer, engine, given = self.optimizer, self._engine, group["params"]
        given = [given] if isinstance(given, torch.Tensor) else list(given)
        group = {**optimizer.defaults, **group, "params": given}
        with self._gate.open():
            names, trained, nature = self._known([group])
            if nature.needs > self._nature.needs:  # weights are laid out by now for what the optimizer needed
                raise InputError(
                    f"optimizer.add_param_group: with these settings {type(optimizer).__name__} needs more of a tensor "
                    "than the pieces that the plan gave it: add the group before prepare"
                )
            if engine is not None:  # else the first forward makes the engine, and the pieces with it
                held = optimizers.held_pieces(engine.technique, engine.state.owners, engine.state.names)
                pieces = ([param] if name not in self._shapes else held.get(name, [])
                          for name, param in zip(names[0], given, strict=True))  # fmt: skip
                group["params"] = [piece for each in pieces for piece in each]
            type(optimizer).add_param_group(optimizer, group)
            if engine is not None:
                self._place_state(engine.state, engine.state.tier)
        self.built += options_of(engine)[-1:] if engine is not None else []
        self.all_names += names
        self._groups += trained
        self._watch_pieces()

    def _adopt(self, engine: Engine, before: States) -> None:
        """Points the optimizer at this rank's pieces. `before`: {name: its whole state so far}. Collective."""
        plan, optimizer, state = self.plan, self.optimizer, engine.state
        state.owners = optimizers.adopt(
            optimizer, self._groups, self.all_names, engine, self._shapes, self._nature, whole=not holds_pieces(plan)
        )
        state.optimizer, state.needs_closure = optimizer, self._nature.needs_closure
        before_it, state.tier = state.tier, None
        if before and holds_pieces(plan):
            put(state, optimizer, before)
        self._place_state(state, before_it)

    def _place_state(self, state: RankState, before: StateTiers | None) -> None:
        """Moves the optimizer's state into the plan's tier (host memory, a file); `before`: its former tier or None."""
        if before is not None:
            before.wake_all()
        state.tier = make_tier(state, optimizers.makes_of(self.optimizer))
        if before is not None:
            before.close()

    @names_line
    def replace_optimizer(self, optimizer: Any) -> Any:
        """Returns `optimizer`, changed in place to train this rank's pieces; the former one can step no more.

        Collective.
        Raises `InputError` for the former one itself.
        """
        self._passes("prepared.replace_optimizer(...)")
        if (optimizer := as_one_optimizer(optimizer)) is self.optimizer:
            raise InputError("prepared.replace_optimizer: this is the optimizer that the plan has already")
        retired, engine = self.optimizer, self._engine
        with self._gate.open():
            self._take(optimizer)
            before = states_of(optimizer, self.all_names)
            if engine is not None:
                with generators_kept(), thawed(self.model, self._shapes):
                    self._adopt(engine, before)
                self.built = options_of(engine)
        optimizers.retire(retired)
        open_doors(self)
        self._watch_pieces()
        return optimizer_as_given(optimizer)

    @names_line
    def _spread(self, args: tuple = (), kwargs: dict | None = None) -> None:
        """Puts the model's weights where the plan has them; (args, kwargs): a call that gives its cuts. Collective."""
        model, mesh = self.model, self.mesh
        self.calls.suspend()
        refuse_hooks(model, self.plan)  # put on since prepare
        Gathers.on_gather = None  # what is tried is the model, in which nothing is gathered
        whole = dict(model.named_parameters(remove_duplicate=False))
        gradients = {name: param.grad for name, param in whole.items()}  # that the script has set already
        with torch.device("cpu"):  # where the model is tried
            engine = self._made(args, kwargs or {})
        cuts = set(engine.state.tensor.cuts) if engine.state.tensor is not None else set()
        in_pieces = self._shares or isinstance(engine.technique, FullShard)
        self._guard(engine, cuts)
        self._whole_gradients.begin_with(gradients)
        self._follow(engine, in_pieces=in_pieces)
        now = dict(model.named_parameters(remove_duplicate=False))
        for slot in engine.technique.slots:
            mark_like(slot.master, whole[slot.name])
        self._script_weights.retire((one, now[name]) for name, one in whole.items() if now[name] is not one)
        self.built = options_of(engine)
        if isinstance(engine.technique, FullShard):  # whose refusals then name the script's line
            engine.technique.tell_branches(names_line)
        self._watch_pieces()
        self.calls.pieces = self._pieces
        self.calls.watch(self, engine, gathers=in_pieces or bool(mesh.inner))
        if self.pending is not None:  # `shardwise.load` came before this first forward
            self._restored(self.pending)
        self._notices.say(self.notices)

    def _made(self, args: tuple, kwargs: dict) -> Engine:
        """Returns the engine over the model and the script's optimizer, its cuts by rank 0's call. Collective."""
        model, plan, mesh = self.model, self.plan, self.mesh
        call = shared_call(args, kwargs, mesh.world, mesh.device) if waits_for_call(plan) else None
        dealt = self.calls.dealt if self.calls.whole is None else None
        samples = dealt.local.count if dealt is not None else None
        samples = gather_json(samples, mesh.world, mesh.device)[0] if call is not None else None  # as rank 0's call
        training = {child: child.training for child in model.modules()}
        before = states_of(self.optimizer, self.all_names)
        if mesh.world.size > 1:
            same_given("prepare: the optimizer's state", before, mesh.world, mesh.device)
        with generators_kept(), thawed(model, self._shapes), self.calls.entries.paused():
            self._engine = engine = make_engine(
                model, plan, mesh, self._options.branches, self.seed, self._options.spatial, call, samples
            )
            self._adopt(engine, before)
        for child, mode in training.items():
            child.training = mode
        if engine.state.tensor is not None:
            check_cuts(engine.state.tensor.cuts, mesh.world, mesh.device)
        if self.calls.draws is not None and is_compiled(model):
            engine.notices.append(
                'the model is compiled, which has no effect where draws are followed: give randomness="fast" to use it'
            )
        return engine

    def _guard(self, engine: Engine, cuts: set[str]) -> None:
        """Sets up what answers the script's reads of gradients and weights; `cuts`: names of weights cut by tp, ep."""
        calls, state = self.calls, engine.state
        self._gate = gate = Gate()
        self.gradients = Gradients(self, state)
        if self._pieces or state.precision.mixed or state.pairs or state.owners is not None:
            self._whole_weights = WholeWeights(self, engine)
        self._script_weights = ScriptWeights(self, engine, self._whole_weights, cuts)
        if cuts:
            read_outside(self.model, lambda: not gate.is_open and calls.is_outside, refuse_replaced)

    def _follow(self, engine: Engine, *, in_pieces: bool) -> None:
        """Begins to watch what the script does to the model; `in_pieces`: ranks hold shares or shards of weights."""
        others = in_pieces or engine.state.precision.mixed or bool(engine.state.pairs)
        self._optimizer_guard = OptimizerGuard(self._script_weights)
        guard_conversion(self.model)
        self._copied_from = engine if others else None
        hold(self, whole=not others)
        self._asking = Asking(self._gate, self.calls, buckets_of(engine))
        self._first, self._settles = FirstSteps(engine), in_pieces
        if self.calls.leader is self.calls and self.side is None and (profile := asked_profile(engine)) is not None:
            self._profile, self.loader.reading = profile, profile.reading

    @property
    def waits(self) -> bool:
        """Returns whether the model is not spread yet, because its first training forward must give the cuts."""
        return self._engine is None

    @property
    def notices(self) -> list[str]:
        """Returns sentences worth knowing about this run, found so far. Each is printed once, by rank 0."""
        return [*(self._engine.notices if self._engine is not None else []), *self.loader.notices]

    @property
    def engine(self) -> Engine:
        """Returns the plan's `Engine`; `InputError` before the first training forward that makes it (`waits`)."""
        if self._engine is None:
            raise InputError(
                f"plan {self.plan}: cuts are derived from the model's first forward in training, and it has not been "
                "called yet: call the model itself (model(...), in train mode), not its parts, and let a forward of it "
                "use parameters that the script uses by itself (an nn.ParameterList)"
            )
        return self._engine

    def __iter__(self) -> Iterator[Any]:
        return iter((as_given(self.model), optimizer_as_given(self.optimizer), self.loader)[: self._options.unpacks])

    def split(self, loader: Any, *, trains: bool = False) -> PartLoader:
        """Returns another loader, cut like the main one; a rank without a sample gets a stand-in, with `part.count` 0.

        trains  Whether losses and random numbers are for its batches, used after or in place of the main one's (a
                curriculum). False: it is of held-out data, or goes beside the main one
        """
        leader = self.calls.leader
        cut = self._cut(loader, leader if trains else leader.other, self._reads)
        cut.recorder = watched(loader, recorder()) if trains else None
        return cut

    def _cut(self, loader: Any, events: Events | None, reads: Reads) -> PartLoader:
        """Returns a `PartLoader` of `loader`, or for None of batches that the script makes."""
        place = (0, 1) if self.calls.whole is not None else (self.mesh.data.index, self.mesh.data.size)
        return PartLoader(OwnBatches() if loader is None else loader, *place, events, reads, self._options.batch_dim)

    @property
    def rank(self) -> int:
        """Returns this rank's number, from 0."""
        return self.mesh.rank

    @property
    def world_size(self) -> int:
        """Returns how many ranks the plan has."""
        return self.mesh.world.size
