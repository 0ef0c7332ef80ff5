"""Follows a script's loop and its model's calls; tells sample_draws, model_look and whole_batch of them.

for x in loader     this rank's part of the batch is known; random operations are watched
model(x)            the first call in training is checked; random numbers inside must belong to samples
backward            random numbers are the script's own again, the same on every rank
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from shardwise.comm import Axis
from shardwise.device import seed_generators
from shardwise.engine.engine import Engine
from shardwise.engine.experts import refuse_draws
from shardwise.errors import InputError, RefusedPlan, ShardwiseError
from shardwise.layout.dealing import Share
from shardwise.memory.chunk_waiting import whole
from shardwise.mesh import Mesh
from shardwise.parallel.batchnorm import sync_module
from shardwise.parallel.full import FullShard
from shardwise.part import whole as uncut
from shardwise.part.dispatch import Gathers
from shardwise.part.levels import Distributed
from shardwise.progress import timing
from shardwise.scripts.agreement import same_on_all
from shardwise.scripts.dealt import Dealt
from shardwise.scripts.entries import ClassAttributes, Entries
from shardwise.scripts.gradient_arrivals import weakly
from shardwise.scripts.guard import Gate
from shardwise.scripts.model_look import ModelLook, look_at_model, refuse_writes
from shardwise.scripts.own_backwards import OwnBackwards
from shardwise.scripts.part_loader import PartLoader
from shardwise.scripts.sample_draws import SampleDraws
from shardwise.scripts.script_lines import Notices, for_good, line_of_script
from shardwise.scripts.script_loop import Loop
from shardwise.scripts.spread import Door, refuse_transform, seen_outside, tensors_of, thawed
from shardwise.scripts.whole_batch import WholeBatch
from shardwise.trace.deferred import seed_of


class Calls(Loop):
    """Follows a script's loop, as the `Events` of its loader, and the calls of one model through forward hooks."""

    def __init__(
        self, model: nn.Module, mesh: Mesh, randomness: str, seed: int, leader: Calls | None = None, *,
        check: bool = True, loss_scope: str = "sample",
    ) -> None:  # fmt: skip
        """Wraps the model's modules so that their calls come here; forwards are followed from `watch` on.

        randomness  "global" or "fast", as in `prepare`
        seed        of "fast" random numbers
        leader      the `Calls` of the first model of the same loader; None: this is the first
        check       Whether the first training call is checked on a few samples (`prepare(check_loss=)`)
        loss_scope  "sample", "global" or "model", as in `prepare`
        """
        super().__init__(model, mesh, randomness, leader, loss_scope)
        self.seed = seed
        self.gathers = False  # Whether every forward needs all ranks
        self.pieces = False  # Whether ranks hold pieces of weights or optimizer state
        self._gate = Gate()
        self.refused: list[ShardwiseError] = []  # what refused this run: every later call raises the first
        self.inside = 0  # nesting depth of the model's forward, 0 outside
        self._running: list[bool] = []  # for each open call, outermost first: whether `inside` counts it
        self.notices: Notices = leader.notices if leader is not None else Notices(mesh.rank)
        if self.on_every_rank:
            self.notices.say(['loss_scope="model": every rank runs the model on all samples of a batch'])
        followed = randomness == "global" and mesh.gradients.size > 1 and not self.on_every_rank
        self._watched = SampleDraws(weakly(self._held_beside), weakly(self.drawn_for)) if followed else None
        self.called = False  # Whether a forward in training has begun
        self._looks = mesh.data.size > 1
        self._looked: dict[nn.Module | None, ModelLook] = {}  # submodule called (None: model) -> its check
        self._check = check
        asks = self._looks and check and not self.on_every_rank
        self._own = OwnBackwards(model, mesh.world, mesh.device) if asks else None
        self._joined = set[nn.Module]()  # batch norms whose statistics are over ranks
        self._classes = ClassAttributes(model)
        self.entries = Entries(model, self._routes)
        self._door: Door | None = None  # set if the plan cuts positions
        self._gathered: set[tuple[str, str]] = set()  # (operation, script line) reported as gathering
        self._script: Callable[[], Any] = lambda: None
        self.forwards = 0  # forwards under "fast", which seed its random numbers

    def compares(self) -> None:
        """Runs `WeightAccess.compare`, which raises if weights or buffers held alike differ. Collective."""
        if (script := self._script()) is not None:
            script.compare()

    @property
    def part(self) -> Share | None:
        """Returns which samples of the current batch count on this rank; None before the first batch."""
        return self.dealt.part if self.dealt is not None else None

    @property
    def of_loss(self) -> Dealt | None:
        """Returns the `Dealt` of the batch that the loss is of; None before any.

        A script that reads ahead has fetched a later batch by then, so the one that the last training forward used
        comes first.
        """
        return self.used or self.dealt

    @property
    def is_outside(self) -> bool:
        """Returns whether the script's own code runs: not the model's forward or methods, nor a backward."""
        return not self.inside and torch._C._current_graph_task_id() == -1

    @property
    def on_every_rank(self) -> bool:
        """Returns whether every rank runs the model on all samples (`loss_scope="model"`)."""
        return self.whole is not None and not self.whole.spreads

    @property
    def counted_once(self) -> tuple[Axis, ...]:
        """Returns (data axis,) if each of its ranks computes the loss of all samples, of which one counts; else ()."""
        return (self.mesh.data,) if self.whole is not None and self.whole.spreads else ()

    @property
    def in_forward(self) -> bool:
        """Whether the model's forward runs now."""
        return self.inside > 0 or self.entries.depth > 0

    def _routes(self) -> bool:
        """Returns whether a submodule is called by the script's own code, and must run as a call of the whole model."""
        if self.inside or self._gate.is_open:
            return False
        return self.gathers or (torch.is_grad_enabled() and self.model.training)

    @property
    def _look_now(self) -> ModelLook:
        """Returns the `ModelLook` of what the script calls now, a submodule or the model; empty before its check."""
        return self._looked.get(self.entries.now) or ModelLook([], [])

    @property
    def draws(self) -> SampleDraws | None:
        """Returns the mode that follows random operations, one for all models of a loop; None if there is none."""
        return self.leader._watched

    def _held_beside(self) -> Share | None:
        """Returns this rank's samples of the current batch of a `Prepared.split` loader; None if there is none."""
        return self.leader.other.local

    # --- the model

    def watch(self, script: Any, engine: Engine, *, gathers: bool) -> None:
        """Registers the forward hooks; called once, when the plan has put the model's weights in place.

        script  the `Prepared`, held weakly
        gathers Whether every forward needs all ranks; False: only a training forward whose weights lie in pieces
        """
        if self.randomness == "global":
            refuse_draws(engine.state.experts)
        self._script = weakref.ref(script)
        self.engine, self._meeting, self._gate, self.gathers = engine, script.meeting, script._gate, gathers
        engine.state.phase.samples = 1 if self.part is None else self.part.count
        if self.draws is not None:
            self.draws.phases.append(engine.state.phase)
        positions = engine.state.forward.positions
        self._door = Door(self.model, positions) if positions is not None else None
        self.model.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)  # before units gather
        self.model.register_forward_hook(self._leave, with_kwargs=True)
        self.model.register_forward_hook(self._end, with_kwargs=True, always_call=True)
        if self.mesh.world.size > 1:
            self._listen(engine)
        self._classes.changed()
        self.resume()

    @for_good
    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Hook before a forward: returns (args, kwargs) in the compute dtype, cut to this rank's samples and positions.

        Also selects the batch, checks the model on its first training call, and begins to follow random operations.
        """
        assert self.engine is not None
        self._running.append(False)
        # tensors of a torch.func transform have no memory that could be sent
        if self.mesh.world.size > 1:
            refuse_transform()
        # methods that are called by themselves see whole arguments: their cuts were never rehearsed
        if self._door is not None and self.entries.now is not None and torch.is_grad_enabled():
            raise RefusedPlan(
                f"a {type(self.entries.now).__name__} of the model is called by itself where positions are cut, which "
                "is followed around the model's own call alone: let model(...) call it, or leave cp, cp_ulysses and "
                "domain out"
            )
        # a parameter that the script put in another's place would be used here, and not trained
        if (script := self._script()) is not None:
            script.settle()
        self._running[-1], self.inside = True, self.inside + 1
        trains = self._trains(module)
        # the outermost call alone meets the loader's batches; calls inside it are part of it
        if self.inside == 1 and self.mesh.data.size > 1:
            # a script without a loader: what the model is given is the batch
            if trains and self.leader.unfed:
                self.leader._comes_unfed((args, kwargs))
            self.leader.select_batch_for_forward((args, kwargs), trains=trains)
        if self.gathers or (trains and self.pieces):  # replicas meet in backward alone
            self._passes(f"a forward {'in training' if trains else 'without gradients'}")
        precision = self.engine.state.precision
        if precision.mixed:
            args, kwargs = precision.cast_inputs((args, kwargs))
        # under another loss_scope the arguments of a training call are whole on every rank here, and are cut below
        # samples that every rank has (a GAN's fixed noise) count once in the joined statistics
        if module.training and self._joined and not (trains and self.whole is not None):
            self._see_whether_same(args, kwargs)
        # an evaluation draws nothing for samples, and is not looked at
        if not trains:
            return self._cut(args, kwargs)
        self.called, self.used, self._spent = True, self.dealt, False
        self.resume()
        # once for each entry (the model, and methods that the script calls): each has outputs of its own
        if self._looks and self.entries.now not in self._looked:
            self._looked[self.entries.now] = ModelLook([], [])
            self._look(self.engine, args, kwargs)
        # the door of loss_scope="global": this rank's samples go in, and `_leave` gathers
        if self.whole is not None and self.whole.spreads and self.inside == 1:
            self.whole.dims = self._look_now.dims
            args, kwargs = self._own_samples(self.whole, args, kwargs)
        if self.draws is not None:
            # what every rank is given alike draws alike as it is: nothing is dealt over samples
            if not self.draws.alike:
                look = self._look_now
                self.draws.enter(first=not self._dim and not look.turned, dims=look.drawn)
        # "fast": each rank draws for itself, but not what another rank, or its own last forward, has drawn
        elif self.randomness == "fast" and self.engine.data_ranks > 1:
            self.forwards += 1
            seed_generators(seed_of("fast", self.seed, self.forwards, self.engine.data_rank))
        return self._cut(args, kwargs)

    def _trains(self, module: nn.Module) -> bool:
        """Returns whether the script runs a training forward: train mode, gradients on, no check of the model."""
        assert self.engine is not None
        return module.training and torch.is_grad_enabled() and not self.engine.state.phase.looked_at

    def _own_samples(self, whole: WholeBatch, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Returns (args, kwargs) cut to this rank's samples, or to one stand-in sample if it has none.

        Called under `loss_scope="global"`. Raises `InputError` before the first batch.
        """
        assert self.engine is not None
        if self.dealt is None:
            raise InputError(
                'loss_scope="global": the model is called before the loader that was given to prepare has handed out a '
                "batch, so how many samples it has is not known: go through that loader"
            )
        args, kwargs = whole.enter(args, kwargs, self.dealt.part.total, self._dim or 0)
        self.notices.say(whole.notices)
        self.engine.state.phase.samples = whole.rows.count
        # draws in the forward are for these samples, not for the whole batch that the loader handed out
        if self.draws is not None:
            self.draws.part = whole.local
        return args, kwargs

    def _cut(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Returns (args, kwargs) as this rank's shares if the plan cuts positions, else unchanged.

        If a submodule is called by itself nothing is cut. Under tp an argument that is another model's cut output is
        gathered.
        """
        # nothing is cut; or the outermost call has been; or a submodule is called by itself, on whole arguments
        if self._door is None or self.inside > 1 or self.entries.now is not None:
            # without a door, a tp model may be given another model's cut output: it must see whole tensors
            cut = self._door is None and self.inside == 1 and self.engine.state.tensor is not None  # type: ignore[union-attr]
            return tree_map_only(Distributed, uncut, (args, kwargs)) if cut else (args, kwargs)
        Gathers.on_gather = None
        call, notice = self._door.enter(args, kwargs)
        if notice:
            self.notices.say([notice])
        return call

    def _gathers_outside(self, operation: str, size: int) -> None:
        """Prints a notice, once per script line, that `operation` gathers a tensor of `size` bytes on every rank."""
        line, cost = line_of_script(), f"{size / 1e6:.3g} MB on every rank"
        if (operation, line) not in self._gathered:
            self._gathered.add((operation, line))
            self.notices.say([f"{operation} has no rule for what is cut here, and gathers it: {cost} [{line}]"])

    @for_good
    def _leave(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        """Hook after a forward: returns the output as the script may use it, cast back and of all samples."""
        assert self.engine is not None
        self._running[-1], self.inside = False, self.inside - 1
        self._classes.give_back()
        if self.draws is not None:
            self.draws.leave()
        self.engine.state.phase.same = False
        output = whole(output)  # which a script's own code is given
        if self.engine.state.precision.mixed:
            output = self.engine.state.precision.cast_outputs(output)
        trains = self._trains(module)
        # outputs of all ranks' samples, once the outermost call is over
        if self.whole is not None and self.whole.spreads and not self.inside and trains:
            output = self.whole.leave(output)
        # outputs are parts of tensors only where weights or positions are cut
        if self.engine.state.tensor is not None or self._door is not None:
            output = seen_outside(output)
        # what the script computes of cut outputs may gather, which is told with its line
        if self._door is not None and not self.inside:
            Gathers.on_gather = weakly(self._gathers_outside)
        # a hook on the output notes a recorded backward (zero=3's units), or refuses it (cut positions)
        if trains and (self.recorded or self._door is not None):
            for tensor in tensors_of(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._on_return)
        return output

    def _end(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        """Hook after a forward, even one that raised: resets this call's state, in case the script goes on."""
        assert self.engine is not None
        # empty behind a forward that did not begin, since the run is refused
        if self._running and self._running.pop():
            self.inside -= 1
            self._classes.give_back()
            self.engine.state.phase.same = False
            if self.draws is not None:
                self.draws.inside = False

    def _see_whether_same(self, args: tuple, kwargs: dict) -> None:
        """Sets `phase.same` to whether all data ranks pass equal arguments, whose samples batch norm then counts once.

        Collective.
        Skipped in a training loop when the arguments have this rank's number of samples, since ranks then have
        different ones.
        """
        assert self.engine is not None
        dealt, found = self.dealt, list(tensors_of((args, kwargs)))
        in_loop = torch.is_grad_enabled() and self.leader.in_loop
        rows = {tensor.shape[0] for tensor in found if tensor.dim()}
        if dealt is not None and in_loop and dealt.even and dealt.part.count in rows:
            return
        self.engine.state.phase.same = same_on_all(found, self.mesh.data, self.mesh.device)

    def _look(self, engine: Engine, args: tuple, kwargs: dict) -> None:
        """Checks the model on a few samples of the first batch and joins its batch norms; raises if samples mix."""
        self.suspend()
        samples, look = 0, ModelLook([], [])
        if self.dealt is not None:
            # a batch that every rank reads whole, else this rank's share of it
            samples = self.dealt.local.count if self.whole is None else self.dealt.part.total
        phase = engine.state.phase
        said = timing(self.notices.shown, "prepare: looking at samples of the first batch")
        with said, self._gate.open(), thawed(self.model, engine.state.names):
            phase.looked_at = True
            if not self.on_every_rank:
                own = (self._own, self.entries.now or self.model) if self._own is not None else None
                look = look_at_model(engine, args, kwargs, samples, self._dim, self._gate, own, check=self._check)
            elif isinstance(engine.state.technique, FullShard):  # ranks run all samples: only writes matter
                refuse_writes(engine.module, args, kwargs, self._gate)
            phase.looked_at = False
        for module in look.batch_norms:
            if module not in self._joined:
                sync_module(module, engine.mesh.data, phase)
                self._joined.add(module)
        engine.notices.extend(one for one in look.notices if one not in engine.notices)
        self._looked[self.entries.now] = look
        torch.clear_autocast_cache()  # of casts that were made without gradients
        self.resume()


def leader_of(loader: Any, mesh: Mesh, randomness: str, loss_scope: str) -> Calls | None:
    """Returns the `Calls` of the first model prepared with this loader; None if `loader` was not made by `prepare`.

    Raises `InputError` for a loader of `prepared.split`, and if that model deals samples differently.
    """
    if not isinstance(loader, PartLoader):
        return None
    leader = loader.events
    # `prepared.split` makes a `PartLoader` with bare `Events`, whose batches no model trains on
    if not isinstance(leader, Calls):
        raise InputError("prepare: the loader comes from prepared.split(), which is for held-out data")
    # what the first model was prepared with, read from its `WholeBatch`
    scope = "sample" if leader.whole is None else "global" if leader.whole.spreads else "model"
    same = (leader.mesh.data.size, leader.mesh.data.index, leader.randomness, scope)
    # on one data rank the scope changes nothing, and the first model's reads as "sample" whatever was given
    if same != (mesh.data.size, mesh.data.index, randomness, loss_scope if mesh.data.size > 1 else "sample"):
        raise InputError(
            "prepare: two models of one loop need plans that deal samples alike: the same dp_replicate times dp_shard, "
            "the same randomness and the same loss_scope"
        )
    return leader
