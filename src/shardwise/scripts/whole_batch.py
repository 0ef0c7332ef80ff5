"""`loss_scope="global"`: the script sees whole batches, and only its model's forward is spread over samples.

    script                  all samples of a batch, on every rank of the data axis; its random numbers are one process's
    model(x)   in training  this rank's samples of x  ->  outputs of all ranks' samples, gathered
    loss                    of the whole batch, the same number on every rank; it counts once
    backward                of the gather keeps the rows of this rank's samples: their gradient is complete;
                            the gradient of x, if x requires one, is gathered again

So a loss need not add up over samples: dice of a batch, a contrastive pair, samples mixed with each other. Each rank
reads whole batches and computes the whole loss; gathered bytes are counted under the tag "loss inputs".

`loss_scope="model"`: the model mixes samples too (a queue or a code book in its forward, one whole graph). Then every
rank runs it on all samples: nothing is cut or gathered, ranks draw the same random numbers, and each rank's gradients
are whole and averaged. The plan spreads weights, gradients and the optimizer's state, and no work.

What this does not do: gather what a model returns that belongs to no sample and differs between ranks (a loss of its
own); see whether an argument without a dim of samples has rows of some of them all the same: `shardwise verify` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import finalize, ref

import torch
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from shardwise.comm import Axis, gather_samples
from shardwise.errors import InputError, RefusedPlan
from shardwise.layout.dealing import Share
from shardwise.part import with_summed_gradient
from shardwise.part.crossing import on_shares
from shardwise.part.levels import Distributed
from shardwise.scripts.dealt import deal
from shardwise.scripts.model_look import Places, Rows
from shardwise.scripts.reading import in_class_of
from shardwise.scripts.script_lines import refuse
from shardwise.step.batching import samples_in
from shardwise.trace.backwards import watch_backwards

_TAG = "loss inputs"


class _OfAllSamples(torch.autograd.Function):
    """Autograd function: returns `tensor` itself; backward gathers along `dim` the gradients of each rank's samples.

    counts  samples of each rank of the axis `data`
    """

    @staticmethod
    def forward(ctx, tensor: torch.Tensor, dim: int, counts: tuple[int, ...], data: Axis) -> torch.Tensor:
        ctx.dim, ctx.counts, ctx.data = dim, counts, data
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        low, count = sum(ctx.counts[: ctx.data.index]), ctx.counts[ctx.data.index]
        mine = gradient.movedim(ctx.dim, 0)[low : low + count].contiguous()
        return gather_samples(mine, ctx.counts, ctx.data, _TAG).movedim(0, ctx.dim), None, None, None


@contextmanager
def _told(whole: WholeBatch | None, inputs: Any) -> Iterator[None]:
    """Context of a backward; turns its failure into `RefusedPlan` if an output of the model is among `inputs`.

    inputs  what gradients are taken of, or None
    """
    try:
        yield
    except RuntimeError:
        given = [output() for output in whole._given] if whole is not None else []
        # another failure is the script's own
        if not any(one is output for one in inputs or () for output in given):
            raise
        # in place of it: torch's says that a tensor is unused
        refuse(RefusedPlan(_BY_OUTPUT))


_BY_OUTPUT = (
    'torch.autograd.grad by an output of the model, under loss_scope="global": outputs are gathered from all ranks one '
    'by one, and no graph goes from one to another: take it in the model\'s forward, or use loss_scope="sample" where '
    'the loss adds up over samples, else "model"'
)


GIVEN_WHOLE = (
    'loss_scope="global": an argument of the model has no dim that counts the batch\'s samples, and every rank gives '
    'all of it to its own samples: where its rows belong to some of them, use loss_scope="model"'
)


class WholeBatch:
    """Wraps a model's training forwards: each rank computes its own samples, and outputs are gathered.

    dims    for each output leaf the `Rows` of its samples, None without; learnt by the model's check, else by size
    rows    the samples of the current call that count on this rank
    local   those that this rank runs: `rows`, or a stand-in
    spreads False: every rank runs the model on all samples, and has whole gradients
    """

    def __init__(self, data: Axis, device: torch.device, *, spreads: bool = True):
        self._data, self._device, self.spreads = data, device, spreads
        self.dims: list[Rows | None] | None = None
        self.rows = Share(None, 0, 0, 0)
        self.local = self.rows
        self._counts: tuple[int, ...] = ()
        self.notices: list[str] = []  # of the call under way
        self._given: list[ref[torch.Tensor]] = []  # outputs of the last call that were gathered
        if spreads:
            here = ref(self)
            finalize(self, watch_backwards(lambda roots, graph, inputs: _told(here(), inputs))).atexit = False

    def enter(self, args: tuple, kwargs: dict[str, Any], samples: int, dim: int) -> tuple[tuple, dict]:
        """Returns (args, kwargs) cut to this rank's samples, whose number may differ from the batch's (two views).

        samples  of the batch
        dim      of the batch's tensors that counts them
        Raises `InputError` if no argument has a dim of that size.
        """
        call = (args, kwargs)
        try:
            total, places = samples_in(call, name="the model's arguments"), Places(None, 0)
            # samples of the batch lie elsewhere: that first dims agree is a chance
            if dim:
                raise InputError("samples lie along another dim")
        except InputError:
            # arguments of several lengths: each one's dim is told by the batch's number of samples
            total, places = samples, Places(samples, dim)
            if not any(places.of(leaf) is not None for leaf in tree_flatten(call)[0]):
                raise InputError(
                    f'loss_scope="global": no argument of the model has a dim of the {samples} samples of the batch, '
                    "so its forward cannot be spread over them"
                ) from None
        leaves = [leaf for leaf in tree_flatten(call)[0] if isinstance(leaf, torch.Tensor) and leaf.dim()]
        # an argument without one goes whole to every rank, which is right only where its rows belong to no sample
        self.notices = [GIVEN_WHOLE] if any(places.of(leaf) is None for leaf in leaves) else []
        dealt = [deal(total, self._data.size, rank) for rank in range(self._data.size)]
        mine = dealt[self._data.index]
        self.rows, self.local = mine.part, mine.local
        self._counts = tuple(one.part.count for one in dealt)
        call = tree_map_only(torch.Tensor, lambda leaf: self._from_whole_batch(leaf, places.of(leaf)), call)
        return places.cut(call, mine.local.start, mine.local.start + mine.local.count)

    def _from_whole_batch(self, leaf: torch.Tensor, dim: int | None) -> torch.Tensor:
        """Returns an argument whose gradient is gathered for all samples, as a script may read it (an attack).

        dim  that counts its samples; None: it is returned unchanged
        """
        if dim is None or not leaf.requires_grad or isinstance(leaf, Distributed):
            return leaf
        return _OfAllSamples.apply(leaf, dim, self._counts, self._data)

    def leave(self, output: Any) -> Any:
        """Returns the model's output for all samples, gathered from ranks, in its own class. Collective.

        Raises `RefusedPlan` for an object in it that may hold tensors.
        """
        leaves, spec = tree_flatten(dict(output) if isinstance(output, Mapping) else output)
        # never looked at, or another call with other outputs: by size, where only the first dim counts
        if self.dims is None or len(self.dims) != len(leaves):
            places = Places(self.local.count, 0, more=False)
            found = [places.of(leaf) for leaf in leaves]
            self.dims = [None if dim is None else Rows(dim) for dim in found]
        gathered = [self._whole(*pair) for pair in zip(leaves, self.dims, strict=True)]
        self._given = [ref(leaf) for leaf in gathered if isinstance(leaf, torch.Tensor)]
        return in_class_of(output, tree_unflatten(gathered, spec))

    def _whole(self, leaf: Any, rows: Rows | None) -> Any:
        """Returns one output leaf for all samples; one without samples (`rows` None) unchanged, its gradient summed.

        Raises `RefusedPlan` for an object that may hold tensors.
        """
        # a plain value is the same on every rank; another object may hold tensors, which would not be gathered
        if not isinstance(leaf, torch.Tensor):
            if leaf is None or isinstance(leaf, bool | int | float | str):
                return leaf
            raise RefusedPlan(
                f'loss_scope="global" gathers the outputs of the model, and cannot look into a {type(leaf).__name__}: '
                "return tensors, tuples or dicts, or register the class as a pytree"
            )
        if rows is None:  # every rank computes the loss, and one of them counts what it asks of this
            return with_summed_gradient(leaf, (self._data,))

        def gathered(share: torch.Tensor) -> torch.Tensor:
            mine = rows.first(share)[: self.rows.count]
            return rows.back(gather_samples(mine.contiguous(), self._counts, self._data, _TAG))

        return on_shares(leaf, gathered)
