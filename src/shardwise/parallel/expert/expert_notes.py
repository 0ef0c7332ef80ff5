"""Record operations on stacked weights in a mixture's forward, and ask for experts' results when values are needed.

    x[mine] @ w1[e]                   the product is recorded, not computed
    made.index_add_(0, mine, ...)     needs values, so the rows x[mine] are given to `answer`, with the expert's index

Values are needed if a result is written into a plain tensor, is combined with another expert's, is read by Python, or
if an operation does more than treat each expert by itself. The recorded operations are run as an expert's program up
to the last one that reads weights; what follows (a gate's weight times the result) is computed on this rank.

A forward picks its weights in one of four ways (`ways`). An expert's own operations become an `ExpertProgram`, which
the rank that holds the expert runs on rows of all ranks.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from shardwise.parallel.expert.expert_forms import Forms, KnownForms, dim_of_experts, forms_of_all, keeping_experts
from shardwise.parallel.expert.expert_program import (
    HERE,
    ROWS_DTYPE,
    EarlierResult,
    ExpertProgram,
    ExpertStep,
    GivenRows,
    SharedTensor,
    StackedWeight,
    name_of,
)  # fmt: skip
from shardwise.parallel.expert.expert_tensor import ExpertTensor, NotedResult, ReadOtherwise, empty_form, noted_of
from shardwise.parallel.expert.two_passes import OWN_SWITCHES, switches_now
from shardwise.parallel.expert.ways import AllExperts, OneExpert, PickedExperts, SortedRows, get_one, product_of_sorted
from shardwise.trace.leaves import replaced, tensors_in

Answer = Callable[[int, list[torch.Tensor]], torch.Tensor]  # (expert, tensors of rows (n, ...)) -> (n, ...)
_ITERATED = (torch.Tensor.__iter__, torch.Tensor.unbind, torch.unbind)
_SELECTED = (torch.Tensor.select, torch.select)
_PICKED = (torch.Tensor.index_select, torch.index_select)
_GROUPED = tuple(
    func for func in (getattr(torch, "_grouped_mm", None), getattr(nn.functional, "grouped_mm", None)) if func
)
_WRITES = re.compile(r"[a-z].*[^_]_|__i(?!nvert).*__")  # names of in-place functions: `add_`, `__iadd__`


class ExpertNotes:
    """The record of the operations on stacked weights in one forward of a mixture.

    experts      their number E
    answer       from (expert, its tensors of rows (n, ...)) to the expert's results (n, ...)
    device       on which the forward runs
    shared       id of each parameter and buffer of the mixture that all experts share -> its name
    known_forms  cache of forms, kept from forward to forward
    program      the operations of an expert, once the first has been asked; all experts must run the same
    """

    def __init__(
        self, experts: int, answer: Answer, device: torch.device, shared: dict[int, str], known_forms: KnownForms
    ):  # fmt: skip
        self.experts, self.answer, self.device, self.shared = experts, answer, device, shared
        self.known_forms = known_forms
        self.program: ExpertProgram | None = None
        self._switches = switches_now(device)
        self._count = 0

    def weight(self, name: str, share: torch.Tensor) -> ExpertTensor:
        """Returns the stand-in (E, ...) that the forward reads as the stacked weight `name`.

        share   this rank's block of the weight, whose shape behind dim 0 and dtype it has
        """
        counts = self.experts, self.experts + 1
        forms = [empty_form((count, *share.shape[1:]), share.dtype) for count in counts]
        return self._tensor(None, (), {}, AllExperts(dim=0), forms, of_weights=True, weight=name)

    def _tensor(
        self, func: Callable | None, args: tuple, kwargs: dict, way: OneExpert, forms: Forms, *,
        of_weights: bool, weight: str | None = None,
    ) -> ExpertTensor:  # fmt: skip
        """Returns a new `ExpertTensor`; arguments as the fields of `NotedResult`.

        Raises `ReadOtherwise` if the mixture has switched autocast or grad mode, which the expert's rank would not do.
        """
        if switches_now(self.device) != self._switches:
            raise ReadOtherwise(f"its experts {OWN_SWITCHES}")
        self._count += 1
        args, kwargs = replaced(ExpertTensor, noted_of, (args, kwargs))
        return ExpertTensor(NotedResult(self._count, func, args, kwargs, way, forms, of_weights, weight), self)

    # --- an operation

    def called(self, func: Callable, name: str, args: tuple, kwargs: dict) -> Any:
        """Returns the result of torch's function `func`, of this `__name__`, for arguments with `ExpertTensor`s.

        Raises `ReadOtherwise` if stacked weights are read other than by experts that compute rows.
        """
        args, kwargs = replaced(ExpertTensor, _value_if_known, (args, kwargs))
        if not tensors_in((args, kwargs), ExpertTensor):
            return func(*args, **kwargs)
        picked = self._picking(func, args, kwargs)
        if picked is not None:
            return picked
        writes = bool(_WRITES.fullmatch(name))
        elsewhere = "out" in kwargs or (writes and not isinstance(args[0], ExpertTensor))
        if elsewhere or name == "__setitem__":
            return self._on_values(func, args, kwargs)
        if func is torch.einsum and any(leaf.noted.of_weights for leaf in tensors_in(args, ExpertTensor)):
            kept = keeping_experts(args)
            if kept is not None:  # experts give their summands; the sum over experts is computed on this rank
                return torch.einsum(*kept).sum(0)
        results = self._noted(func, args, kwargs)
        if results is None:
            return self._on_values(func, args, kwargs)
        if not writes:
            return results
        args[0].noted = results.noted  # an in-place operation: its first argument is the result from here on
        return args[0]

    def _picking(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Returns the stand-in for picked weights, or for a grouped product; None if the call picks no weights.

        A tuple of one stand-in for each expert if the call iterates over the dim of experts.
        """
        if func in _GROUPED:
            return self._grouped(*args, **kwargs)
        stacked = _argument(args, kwargs, 0, "input")
        if func is nn.functional.embedding:
            stacked, stands_for_rows = _argument(args, kwargs, 1, "weight"), stacked
            return self._picked(stacked, stands_for_rows) if self._stacked_dim(stacked) == 0 else None
        dim = self._stacked_dim(stacked)
        if dim is None:
            return None
        if func in _ITERATED and (_argument(args, kwargs, 1, "dim") or 0) % stacked.dim() == dim:
            return tuple(self._one(torch.Tensor.select, (stacked, dim), {}, n) for n in range(self.experts))
        if func is torch.Tensor.__getitem__ and dim == 0:
            return self._indexed(stacked, args[1] if isinstance(args[1], tuple) else (args[1],))
        if func in (*_SELECTED, *_PICKED):
            where, index = _argument(args, kwargs, 1, "dim"), _argument(args, kwargs, 2, "index")
            if where % stacked.dim() != dim:
                return None
            if func in _SELECTED:
                return self._one(torch.Tensor.select, (stacked, dim), {}, int(index))
            return self._picked(stacked, index) if dim == 0 else None
        return None

    def _stacked_dim(self, tensor: Any) -> int | None:
        """Returns the dim that counts experts, if `tensor` is computed from weights alone and has them all; or None."""
        noted = noted_of(tensor)
        whole = isinstance(noted, NotedResult) and noted.of_weights and isinstance(noted.way, AllExperts)
        return noted.way.dim if whole else None

    def _indexed(self, stacked: ExpertTensor, index: tuple) -> ExpertTensor | None:
        """Returns the stand-in for `stacked[index]` if the first index picks experts; None if it keeps all of them.

        Raises `ReadOtherwise` for a mask, or for several indices together with a tensor of experts.
        """
        first, rest = (index or (Ellipsis,))[0], index[1:]
        if first is None or first is Ellipsis or isinstance(first, slice):
            return None
        if isinstance(first, list | range):
            first = torch.tensor(list(first), device=self.device)
        if isinstance(first, torch.Tensor) and first.dim():
            if first.dtype == torch.bool or any(part is not Ellipsis and part != slice(None) for part in rest):
                raise ReadOtherwise("stacked weights are picked by a mask, or by several indices at once")
            return self._picked(stacked, first)
        return self._one(get_one, (stacked,), {"rest": rest}, operator.index(first))

    def _one(self, func: Callable, args: tuple, kwargs: dict, expert: int) -> ExpertTensor:
        """Returns `func(*args, expert, **kwargs)`, the weights of one expert."""
        if not -self.experts <= expert < self.experts:  # as torch raises it, which ends Python's loop over a tensor
            raise IndexError(f"index {expert} is out of bounds for {self.experts} experts")
        form = func(args[0].noted.forms[0], *args[1:], 0, **kwargs)
        way = OneExpert(expert % self.experts)
        return self._tensor(func, (*args, HERE), kwargs, way, [form], of_weights=True)

    def _picked(self, stacked: ExpertTensor, index: torch.Tensor) -> ExpertTensor:
        """Returns the stand-in for `stacked[index]`, the weights of the expert that each element of `index` names."""
        like = stacked.noted.forms[0]
        form = like.new_empty((*index.shape, *like.shape[1:]))
        way = PickedExperts(made_dim=index.dim(), index=index, experts=self.experts)
        return self._tensor(torch.Tensor.__getitem__, (stacked, HERE), {}, way, [form], of_weights=True)

    def _grouped(self, rows: Any, weights: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
        """Returns the stand-in (R, I) for the grouped product of rows (R, H), sorted by expert, and weights (E, H, I).

        offs (E,)  ends of each expert's rows;  out_dtype  dtype of the result, None: that of the weights
        Raises `ReadOtherwise` for other forms of the call, or other offsets than in the product before.
        """
        if self._stacked_dim(weights) != 0 or offs is None or bias is not None:
            raise ReadOtherwise("a grouped product of stacked weights is called otherwise than with rows and offsets")
        way: OneExpert = SortedRows(offsets=offs)
        if isinstance(rows, ExpertTensor):
            if rows.noted.of_weights or not rows.noted.way.same(way):
                raise ReadOtherwise("grouped products of stacked weights have other offsets than those before them")
            way = rows.noted.way
        form = weights.noted.forms[0].new_empty((rows.shape[0], weights.shape[-1]), dtype=out_dtype)
        return self._tensor(product_of_sorted, (rows, weights, HERE), {}, way, [form], of_weights=False)

    def _noted(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Returns the stand-in for an operation's result, a tuple for several results; None if it needs values."""
        leaves = tensors_in((args, kwargs))
        operands = [leaf.noted for leaf in leaves if isinstance(leaf, ExpertTensor)]
        way, computed = operands[0].way, [noted for noted in operands if not noted.of_weights]
        others = [leaf for leaf in leaves if not isinstance(leaf, ExpertTensor)]
        if name_of(func) is None or not all(noted.way.same(way) for noted in operands):
            return None
        if isinstance(way, AllExperts):
            results = forms_of_all(func, args, kwargs, self.experts)
        else:
            forms, rows = self.known_forms.of_rows(func, args, kwargs), [noted.forms[0] for noted in computed] or others
            # an operation that mixes rows or drops them (a sum over them) is not an expert's own
            fit = forms is not None and (not rows or all(way.fits(form, rows) for form, *_ in forms))
            results = [(way, form) for form in forms] if forms is not None and fit else None
        if results is None:
            return None
        of_weights = not others and not computed
        call = self._tensor(func, args, kwargs, *results[0], of_weights=of_weights)
        if len(results) == 1:
            return call
        return tuple(
            self._tensor(operator.getitem, (call, place), {}, *result, of_weights=of_weights)
            for place, result in enumerate(results)
        )

    def _on_values(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """Returns the function's result after each `ExpertTensor` argument is replaced by its values."""
        args, kwargs = replaced(ExpertTensor, self.value, (args, kwargs))
        return func(*args, **kwargs)

    # --- values

    def value(self, tensor: ExpertTensor) -> torch.Tensor:
        """Returns the values behind `tensor`, for which experts are asked if necessary.

        Raises `ReadOtherwise` if it is computed from weights alone.
        """
        noted = tensor.noted
        if noted.value is None:
            if noted.of_weights:
                raise ReadOtherwise("stacked weights are read by other operations than their experts' own")
            last = _last_of_experts(noted)
            if last is not None:
                last.value = self._answered(last)
            _evaluate(noted)
        assert noted.value is not None
        return noted.value

    def settled(self, results: Any) -> Any:
        """Returns a forward's results, of any structure, with values in place of `ExpertTensor`s."""
        return tree_map(lambda leaf: self.value(leaf) if isinstance(leaf, ExpertTensor) else leaf, results)

    def _answered(self, last: NotedResult) -> torch.Tensor:
        """Returns the values of `last`, the end of an expert's program, from `answer` for each expert's rows.

        Raises `ReadOtherwise` if this program is not the one of the experts before.
        """
        program, leaves = _Writing(last, self).written()
        self.program = self.program or program
        if self.program != program:
            raise ReadOtherwise("its experts do not all run the same operations, or rows go through them twice")
        calls = last.way.calls(leaves, program.rows, self.experts)
        return last.way.joined([self.answer(expert, rows) for expert, rows in calls])


class _Writing:
    """Converts the operations behind a result, `last`, into an expert's program."""

    def __init__(self, last: NotedResult, notes: ExpertNotes):
        self.last, self.notes = last, notes
        self.behind = last.behind()
        self.places = {noted.number: place for place, noted in enumerate(self.behind)}
        self.leaves: list[torch.Tensor] = []  # the tensors of rows that the program reads
        self.dims: list[int | None] = []  # for each of `leaves` the dim that counts experts, or None

    def written(self) -> tuple[ExpertProgram, list[torch.Tensor]]:
        """Returns (the program, the tensors of rows that it reads, of all experts)."""
        steps = [self._step(noted) for noted in self.behind]
        return ExpertProgram(tuple(steps), self.last.way.kind, tuple(self.dims), self.last.way.made_dim), self.leaves

    def _step(self, noted: NotedResult) -> ExpertStep:
        """Returns the program's step for one recorded operation or weight."""
        if noted.weight is not None:
            return ExpertStep("", (StackedWeight(noted.weight),), {})
        kinds = (NotedResult, torch.Tensor)
        args, kwargs = replaced(kinds, lambda leaf: self._leaf(leaf, noted), (noted.args, noted.kwargs))
        # a dtype argument that equals the rows' was read from them, and must follow them in another precision
        dtypes = {leaf.dtype for leaf in self.leaves}
        args = tuple(ROWS_DTYPE if isinstance(arg, torch.dtype) and arg in dtypes else arg for arg in args)
        if kwargs.get("dtype") in dtypes:
            kwargs["dtype"] = ROWS_DTYPE
        return ExpertStep(name_of(noted.func) or "", args, kwargs)

    def _leaf(self, leaf: Any, reader: NotedResult) -> Any:
        """Returns the program's stand-in for `leaf`, an argument of the operation `reader`.

        Raises `ReadOtherwise` for a tensor that is neither shared by all experts nor has a row for each result.
        """
        if isinstance(leaf, NotedResult) and leaf.value is None:
            return EarlierResult(self.places[leaf.number])
        tensor = leaf.value if isinstance(leaf, NotedResult) else leaf
        assert tensor is not None
        if id(tensor) in self.notes.shared:
            return SharedTensor(self.notes.shared[id(tensor)])
        all_experts = isinstance(self.last.way, AllExperts)
        dim = dim_of_experts(reader.func, reader.args, reader.kwargs, leaf, self.notes.experts) if all_experts else None
        if not self.last.way.has_rows(tensor, dim, self.last.forms[0]):
            raise ReadOtherwise(f"its experts read a tensor of shape {tuple(tensor.shape)} that has no row of each")
        for place, other in enumerate(self.leaves):
            if other is tensor and self.dims[place] == dim:
                return GivenRows(place)
        self.leaves.append(tensor)
        self.dims.append(dim)
        return GivenRows(len(self.leaves) - 1)


def _argument(args: tuple, kwargs: dict, place: int, name: str) -> Any:
    """Returns the argument at position `place` or with keyword `name`; None if it is not given."""
    return args[place] if len(args) > place else kwargs.get(name)


def _value_if_known(tensor: ExpertTensor) -> torch.Tensor:
    """Returns the values of an `ExpertTensor` if they are known, else itself."""
    return tensor if tensor.noted.value is None else tensor.noted.value


def _last_of_experts(noted: NotedResult) -> NotedResult | None:
    """Returns the last result behind `noted` that reads weights, where an expert's program ends; None if none does.

    Returns `noted` itself if operations after it also need earlier results, which only the expert's rank computes.
    """
    behind = noted.behind()
    readers = [result for result in behind if not result.of_weights and any(r.of_weights for r in result.operands)]
    if not readers:
        return None
    last = readers[-1]
    after = {last.number}
    for result in behind:
        if result.number > last.number and not result.of_weights:
            # results before `last` have no values on this rank
            if not all(operand.number in after or operand.value is not None for operand in result.operands):
                return noted
            after.add(result.number)
    return last


def _evaluate(noted: NotedResult) -> None:
    """Computes the values of `noted` and of what lies between it and results whose values are known."""
    for result in noted.behind():
        args, kwargs = replaced(NotedResult, lambda operand: operand.value, (result.args, result.kwargs))
        assert result.func is not None
        result.value = result.func(*args, **kwargs)
