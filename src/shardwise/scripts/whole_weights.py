"""`prepared.whole()`: within it a script's own code reads and writes whole weights, gradients and optimizer state.

    with prepared.whole():              model.parameters(), buffers and optimizer.param_groups are whole
        for q, p in zip(average.parameters(), model.parameters()):
            q.lerp_(p, 0.1)
    with prepared.whole(grads=True)     p.grad too
    with prepared.whole(state=True)     optimizer.state[p] too

    ranks' pieces --gather--> stand-ins in the modules' places --the script--> compared, each rank takes its pieces

Outside of it, what is computed of a weight beside the forward (a penalty, a norm, `average.lerp_(p, 0.1)`, a method
that reads one, `p.data.norm()`) is of the whole weight, gathered for it; a write, into a view too (`read_views`),
raises and names this context as the remedy.

What this does not do: run the model's forward inside, or find out which tensors the script has no use for.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from shardwise.comm import all_reduce, broadcast
from shardwise.engine.engine import Engine
from shardwise.engine.load_weights import load_state_dict
from shardwise.errors import InputError, RefusedPlan
from shardwise.parallel.full import FullShard
from shardwise.part import with_summed_gradient
from shardwise.part.pairs import as_pairs
from shardwise.scripts.agreement import same_given
from shardwise.scripts.gradient_arrivals import techniques_of
from shardwise.scripts.guard import OUTSIDE, mark_like, reads_values, units_parameters, writes_into
from shardwise.scripts.joint_optimizer import holds, members_of
from shardwise.scripts.read_views import memory_of, views_of
from shardwise.scripts.script_lines import names_line, refuse
from shardwise.scripts.script_weights import OfPieces, assign
from shardwise.scripts.stepping import Stepping
from shardwise.scripts.whole_optimizer_state import put, share_of
from shardwise.trace.leaves import replaced, tensors_in

# functions, and below attributes, that are answered for the whole weight without a gather
_ABOUT = frozenset({
    "size", "dim", "ndimension", "numel", "nelement", "__len__", "stride", "is_contiguous", "is_complex",
    "is_floating_point", "element_size",
})  # fmt: skip
_ATTRIBUTES = frozenset({"shape", "ndim", "dtype"})
_DIFFERENTIATED = (
    "what was computed of a weight within prepared.whole() is differentiated, and gradients come to ranks' pieces: "
    "compute it (a penalty) before or after the with block, where it is of whole weights too"
)


_GRAD = torch.Tensor.grad


class WholeWeight(nn.Parameter):
    """Stands for one parameter in its modules while `prepared.whole()` is open; the same object each time it opens.

    gradient_is_known  Whether gradients were asked for (`grads=True`)
    """

    gradient_is_known = False

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return memo.setdefault(id(self), nn.Parameter(self.detach().clone(), self.requires_grad))

    @property
    def grad(self) -> torch.Tensor | None:
        self._ask_for_gradient()
        return _GRAD.__get__(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self._ask_for_gradient()
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__delete__(self)

    def _ask_for_gradient(self) -> None:
        """Raises `InputError` if gradients were not asked for, since None would look like a parameter without one."""
        if not self.gradient_is_known:
            refuse(
                InputError("p.grad within prepared.whole(): gradients are gathered by prepared.whole(grads=True) alone")
            )


@names_line
def _differentiated(gradient: torch.Tensor) -> None:
    """Hook of a stand-in's gradient: raises `InputError`, since a gradient would not reach ranks' pieces."""
    raise InputError(_DIFFERENTIATED)


class WholeWeights:
    """The whole weights of one prepared model, for the script's own code.

    is_open  Whether `prepared.whole()` is open
    names    id of a parameter -> its name
    asked    (grads, state) of the context that was opened last
    """

    def __init__(self, prepared: Stepping, engine: Engine) -> None:
        self._prepared, self._state = weakref.ref(prepared), engine.state
        self.is_open = False
        held = dict(engine.module.named_parameters())
        self.names = {id(param): name for name, param in held.items()}
        self._params = held
        self._standing: dict[str, WholeWeight] = {}  # name -> its stand-in, if its module has no whole weight
        self._seen: dict[str, torch.Tensor] = {}  # name -> what the script finds in its modules
        self._gradients: dict[str, torch.Tensor | None] = {}  # name -> whole gradient handed out
        self.asked = (False, False)
        self._places: Any = []  # (parameters of a module, attribute, the piece there)
        self._groups: list[list[Any]] = []  # by group, the optimizer's pieces
        self._technique_of = {
            id(param): (technique, index)
            for technique in techniques_of(engine)
            if isinstance(technique, FullShard)
            for index, param in enumerate(technique.params)
        }
        self._in_units = units_parameters(engine.module)

    @property
    def _script(self) -> Stepping:
        script = self._prepared()
        assert script is not None
        return script

    def meta(self, param: torch.Tensor) -> torch.Tensor:
        """Returns a meta tensor of the shape and dtype of the whole weight of which `param` is this rank's piece."""
        name = self.names[id(param)]
        shape, dtype = torch.Size(param.shape), param.dtype
        if name in self._state.pairs:
            shape, dtype = shape[:-1], dtype.to_complex()
        for spread in (self._state.experts, self._state.tensor):
            shape = shape if spread is None else spread.full_shape(name, shape)
        return torch.empty(shape, dtype=dtype, device="meta")

    # --- functions of torch

    def outside(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Returns `func` of whole weights in place of pieces, outside of `whole()`; `RefusedPlan` if it writes."""
        if self.is_open:  # pieces that the script took before it opened `whole()`
            args, kwargs = replaced(torch.Tensor, self._standing_for, (args, kwargs))
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name in ("__get__", "__set__") else ""
        # shape and the like are asked of the whole weight, which is not gathered for it
        if name in _ABOUT or (name == "__get__" and attribute in _ATTRIBUTES):
            return func(*replaced(torch.Tensor, lambda t: self.meta(t) if id(t) in self.names else t, args), **kwargs)
        if name.startswith("new_"):  # needs the dtype and device alone
            return func(*replaced(DTensor, DTensor.to_local, args), **kwargs)
        # hooks and requires_grad_ go to the piece itself
        if not reads_values(func):
            return func(*args, **kwargs)
        target = (kwargs.get("out"), (*args, *kwargs.values())[0] if writes_into(name) else None)
        # a gathered copy would take the write, and be dropped
        if name == "__set__" or any(id(one) in self.names for one in tensors_in(target)):
            raise RefusedPlan(OUTSIDE.format(attribute or name))
        return self._computed(func, args, kwargs, detached=attribute == "data" or name == "detach")

    def _computed(self, func: Any, args: tuple, kwargs: dict, *, detached: bool) -> Any:
        """Returns `func` of whole weights in place of pieces; a view of a whole weight is a `ReadView`. Collective.

        detached    Whether `func` gives the weight's memory without its gradient (p.data, p.detach())
        """
        script = self._script
        script.meet("a weight that is read outside of its unit's forward")
        copies = set[int]()

        def whole(tensor: torch.Tensor) -> torch.Tensor:
            # not a piece of a parameter: a buffer, or a tensor of the script's
            if id(tensor) not in self.names:
                return tensor
            if torch.is_grad_enabled() and tensor.requires_grad and not detached:
                return self.in_graph(tensor)  # into whose views nothing could be written in one process either
            value = self.value(self.names[id(tensor)])
            copies.add(memory_of(value))
            return value

        args, kwargs = replaced(torch.Tensor, whole, (args, kwargs))
        made = func(*args, **kwargs)
        if not (script.calls.is_outside or detached):
            return made
        version, of_script = script.weights_version, self._prepared
        return views_of(made, lambda: getattr(of_script(), "weights_version", version) == version, copies)

    def _standing_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the stand-in of a piece; any other tensor itself."""
        return self._standing.get(self.names.get(id(tensor), ""), tensor)

    def in_graph(self, piece: torch.Tensor) -> torch.Tensor:
        """Returns the whole weight, whose gradient goes to the ranks' pieces and counts once. Collective."""
        whole: torch.Tensor = OfPieces.apply(piece, self.value(self.names[id(piece)]), self)
        calls = self._script.calls
        beside = () if calls.in_forward else calls.counted_once  # of the samples of all ranks
        return with_summed_gradient(whole, (*beside, *self._script.mesh.inner))

    def taken(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns `torch.autograd.grad(outputs, inputs, ...)`, each gradient sharded as its piece. Collective.

        If an FSDP unit has gathered the weight, the gradient of the gathered one is summed over ranks, sharded and
        added.
        """
        alone, unused = isinstance(inputs, torch.Tensor), kwargs.pop("allow_unused", None)
        pieces = [inputs] if alone else list(inputs)
        units = [self._in_units.get(id(piece)) for piece in pieces]
        # a unit whose forward ran has put its gathered parameter into the graph in place of the piece
        gathered = [getattr(unit, "_unsharded_param", None) for unit in units]
        there = [at for at, tensor in enumerate(gathered) if tensor is not None]
        asked = [*pieces, *(gathered[at] for at in there)]
        # of the piece and the gathered one mostly one is unused, so None must be allowed here and is asked for below
        made = torch.autograd.grad(outputs, asked, *args, allow_unused=True, **kwargs)
        gradients = list(made[: len(pieces)])
        for at, whole in zip(there, made[len(pieces) :], strict=True):
            # None: not used as its unit gathered it; of a weight used in both ways the two gradients add up
            if whole is not None:
                share = self.cut(pieces[at], whole)
                gradients[at] = share if gradients[at] is None else gradients[at] + share
        if not unused and any(gradient is None for gradient in gradients):
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if"
                " this is the desired behavior."
            )
        return tuple(gradients)

    @torch.no_grad()
    def value(self, name: str) -> torch.Tensor:
        """Returns the whole weight `name` in full precision, in memory of its own. Collective."""
        script = self._script
        with script._gate.open():
            return script.engine.full_parameter(name).detach().as_subclass(torch.Tensor).clone()

    def assign(self, param: DTensor, value: torch.Tensor) -> None:
        """Stands for `param.data = value` in the model's forward."""
        assign(self._technique_of.get(id(param)), self._in_units[id(param)], param, value)
        self._script.may_have_written()

    @torch.no_grad()
    def cut(self, piece: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Returns this rank's piece of a whole weight's gradient; for FSDP summed over ranks first, collectively."""
        script = self._script
        # FSDP2 sums what its units' backwards bring; this comes beside them, so summands of other ranks are added here
        if isinstance(piece, DTensor):
            gradient = gradient.clone(memory_format=torch.contiguous_format)
            all_reduce(gradient, script.mesh.gradients, "gradients")
            technique, index = self._technique_of[id(piece)]
            technique._used_now.add(index)
            technique.heard(piece)
        share = share_of(self._state, self.names[id(piece)], gradient).contiguous()
        share = (as_pairs(share) if share.is_complex() else share).to(piece.dtype)
        if not isinstance(piece, DTensor):
            return share
        return distribute_tensor(share, piece.device_mesh, piece.placements, src_data_rank=None)

    # --- the context

    @contextmanager
    def opened(self, grads: bool, state: bool) -> Iterator[None]:
        """Context in which stand-ins are in the places of the model's pieces. Collective, at both ends.

        grads, state  Whether gradients, and the optimizer's state, are whole too
        """
        names_line(self._open)(grads, state)
        try:
            yield
        except BaseException:
            self._close()  # nothing is sent: other ranks may have gone on
            self._empty()
            raise
        names_line(self._end)()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context within an open `whole()`, in which pieces are back for a step of the plan. Collective."""
        asked = self.asked
        self._end()
        yield
        self._open(*asked)

    def _open(self, grads: bool, state: bool) -> None:
        """Gathers, and puts stand-ins into the places of pieces; `InputError` if open, or in a forward. Collective."""
        script = self._script
        # pieces put aside twice would leave the stand-ins in their place
        if self.is_open:
            raise InputError("prepared.whole() within prepared.whole(): everything is whole already")
        # within a forward ranks are at different places, and could not gather
        if not script.calls.is_outside:
            raise InputError("prepared.whole() within the model's forward or a backward: call it after them")
        self.asked = (grads, state)
        script.meet("prepared.whole()")
        script.compare()
        with script._reading():
            for unit in self._state.module.modules():
                if isinstance(unit, FSDPModule):
                    unit.reshard()  # else modules have what was gathered, in place of their pieces
            # where the model's own parameters are whole already, no stand-in is made
            self._seen = self._filled() if script.in_pieces is not None else dict(self._params)
            states = dict(script.engine.full_optimizer_state()) if state else {}
        self._gradients = script._whole_gradients.of_all(self._params) if grads else {}
        self._show(states)

    def _end(self) -> None:
        """Puts the pieces back and takes what the script has changed. Collective."""
        states = self._close()
        self._script.meet("the end of prepared.whole()")
        self._take(states)
        self._empty()

    def forget_gradients(self) -> None:
        """Drops the whole gradients that were handed out (`zero_grad`)."""
        self._gradients = {}
        for standing in self._standing.values():
            _GRAD.__set__(standing, None)

    @torch.no_grad()
    def _filled(self) -> dict[str, torch.Tensor]:
        """Returns {name: whole weight}: a `WholeWeight` if the model has a piece or a narrow one, else itself.

        Collective.
        """
        for name, param in self._params.items():
            # its module has it whole and in full precision already
            if not self._state.precision.mixed and not isinstance(param, DTensor) and self._is_whole(param):
                continue
            value = self.value(name)
            standing = self._standing.setdefault(name, WholeWeight(value, param.requires_grad))
            standing.data = value
            standing.requires_grad_(param.requires_grad)
            if param.requires_grad and not standing._backward_hooks:
                standing.register_hook(_differentiated)
            mark_like(standing, param)
        return self._params | self._standing

    def _is_whole(self, param: torch.Tensor) -> bool:
        """Whether the model's own tensor is the whole weight, in the shape and dtype that the script sees."""
        with self._script._gate.open():
            about = self.meta(param)
            return (about.shape, about.dtype) == (param.shape, param.dtype)

    @torch.no_grad()
    def _empty(self) -> None:
        """Frees the stand-ins' memory; from then on each reads as NaN (0 for integers) in its shape."""
        for standing in self._standing.values():
            real = standing.is_floating_point() or standing.is_complex()  # integers have no NaN
            standing.data = standing.data.new_full((), torch.nan if real else 0).expand(standing.shape)
            _GRAD.__set__(standing, None)

    def _show(self, states: dict[str, dict[Any, Any]]) -> None:
        """Puts stand-ins in the places of pieces: in the modules, the optimizer's groups and its state.

        states  {name: whole optimizer state}, if it was asked for
        """
        script, optimizer, seen = self._script, self._script.optimizer, self._seen
        self._places = [(child._parameters, leaf, param) for child in self._state.module.modules()
                        for leaf, param in child._parameters.items() if param is not None]  # fmt: skip
        for held, leaf, param in self._places:
            held[leaf] = seen[self.names[id(param)]]
        script._optimizer_guard.leave()
        self._groups = [group["params"] for group in optimizer.param_groups]
        for group, names in zip(optimizer.param_groups, script.all_names, strict=True):
            group["params"] = [seen[name] for name in names]
        self._own_states: list[Any] = [one.state for one in members_of(optimizer)]
        # the optimizer's state was not asked for, and stays where it is
        for one in members_of(optimizer) if self.asked[1] else ():
            with script._gate.open():
                rest = {key: value for key, value in one.state.items() if not isinstance(key, torch.Tensor)}
            mine = [(seen[name], state) for name, state in states.items() if state and holds(one, seen[name])]
            one.state = defaultdict(dict, {**{param: dict(state) for param, state in mine}, **rest})
        # gradients that were not asked for are told by the stand-in, which raises when they are read
        for name, standing in self._standing.items():
            _GRAD.__set__(standing, self._gradients.get(name))
            standing.gradient_is_known = self.asked[0]
        self.is_open = script.calls.entries.closed = True

    def _close(self) -> Any:
        """Puts the pieces back; returns the optimizer's state {parameter or key: state} as the script leaves it."""
        script, optimizer = self._script, self._script.optimizer
        self.is_open = script.calls.entries.closed = False
        for held, leaf, param in self._places:
            standing = self._seen[self.names[id(param)]]
            if held.get(leaf) is standing:  # another object there is left for `settle` to refuse
                held[leaf] = param.requires_grad_(standing.requires_grad)
        states: dict[Any, Any] = {}
        for one, own_state in zip(members_of(optimizer), self._own_states, strict=True):
            states |= one.state if self.asked[1] else {}
            one.state = own_state
        for group, params in zip(optimizer.param_groups, self._groups, strict=True):
            group["params"] = params
        script._watch_pieces()
        return states

    @torch.no_grad()
    def _take(self, states: Any) -> None:
        """Checks that the script's changes are the same on all ranks, and takes this rank's pieces of them.

        Collective.
        """
        script, (grads, state) = self._script, self.asked
        weights = {name: tensor.data for name, tensor in self._standing.items()}
        after = {name: tensor.grad for name, tensor in self._standing.items()} if grads else {}
        named = {self._name_of(key): value for key, value in states.items()} if state else {}
        gradients = {name: tensor for name, tensor in after.items() if tensor is not None}
        changed = {"weight": weights, "gradient": gradients, "state": named}
        if script.calls.randomness == "fast":  # generators differ: rank 0's numbers are taken
            for tensor in tensors_in(changed):
                drawn = tensor.contiguous()
                broadcast(drawn, script.mesh.world, 0, "control")
                tensor.copy_(drawn)
        with script._gate.open(), script._state_gate.open():
            same_given("the end of prepared.whole()", changed, script.mesh.world, script.mesh.device)
            # none where the optimizer's state alone is in pieces: the script wrote into the weights themselves
            if weights:
                load_state_dict(self._state, self._under_own_names(weights), strict=False)
                script.may_have_written()
        for name, gradient in after.items():
            if gradient is not self._gradients.get(name):  # the script has set another
                script._whole_gradients.set(self._params[name], gradient)
        if state:
            with script.plainly():
                rest = {
                    key: value for key, value in named.items() if not isinstance(key, str) or key not in self._params
                }
                put(self._state, script.optimizer, {k: v for k, v in named.items() if k in self._params}, rest=rest)

    def _name_of(self, key: Any) -> Any:
        """Returns the name of a parameter that the script sees; any other key unchanged."""
        return next((name for name, one in self._seen.items() if one is key), key)

    def _under_own_names(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the weights by the names of the module's `state_dict`, a shared one under each of its names."""
        own = self._state.module.state_dict(keep_vars=True)
        names = {key: self.names.get(id(value), "") for key, value in own.items()}
        return {key: weights[name] for key, name in names.items() if name in weights}
