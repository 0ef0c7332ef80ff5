"""The four ways in which a forward picks stacked weights (E, ...), and which rows each expert gets.

    OneExpert      w[e]                   the rows that are multiplied with w[e]
    AllExperts     rows with a dim of E   expert e's slice of that dim; all rows of a tensor without such a dim
    SortedRows     a grouped product      the rows from the offset of the expert before up to its own
    PickedExperts  w[index]               the rows whose index is the expert

On the rank that has the rows, a way says which expert gets which (`calls`), and combines the results (`joined`). On
the rank that holds an expert, its static methods give the values of weights, rows and expert index in the program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

Calls = list[tuple[int, list[torch.Tensor]]]  # (expert, its tensors of rows (n, ...))


@dataclass(frozen=True)
class Here:
    """Stands, in a recorded operation, for the index of an expert among those that a rank holds."""


def get_one(stacked: torch.Tensor, place: int, rest: tuple = ()) -> torch.Tensor:
    """Returns `stacked[place, *rest]`."""
    return stacked[(place, *rest)]


def product_of_sorted(rows: torch.Tensor, stacked: torch.Tensor, place: int) -> torch.Tensor:
    """Returns (n, I), one expert's part of a grouped product, from its rows (n, H) and `stacked` (E, H, I)."""
    return rows @ stacked[place]


@dataclass(frozen=True)
class OneExpert:
    """The forward uses the weights of one expert, by its index `expert`. Base class of the other ways.

    kind      key in `WAYS`
    made_dim  what `ExpertProgram.made` holds for results of this way
    """

    expert: int
    kind = "one"
    made_dim: int | None = None

    def same(self, other: Any) -> bool:
        """Whether `other` is a way that picks the same weights."""
        return self == other

    def fits(self, form: torch.Tensor, before: Sequence[torch.Tensor]) -> bool:
        """Whether a result of this form has as many rows as one of the operands `before`, so is still an expert's."""
        return form.dim() > 0 and any(t.dim() > 0 and t.shape[0] == form.shape[0] for t in before)

    def has_rows(self, tensor: torch.Tensor, dim: int | None, made: torch.Tensor) -> bool:
        """Whether `tensor` has a row for each row of `made`, the experts' result.

        dim   the dim of `tensor` that counts experts; None if none does
        """
        return tensor.dim() > 0 and tensor.shape[0] == made.shape[0]

    def calls(self, leaves: list[torch.Tensor], dims: Sequence[int | None], experts: int) -> Calls:
        """Returns (expert, its rows of each tensor) for each expert that has any.

        leaves   tensors of rows of all experts;  dims  for each the dim that counts experts, or None
        experts  the number E
        """
        return [(self.expert, leaves)]

    def joined(self, results: list[torch.Tensor]) -> torch.Tensor:
        """Returns the forward's tensor, combined from the results (n, ...) of `calls`, in their order."""
        return results[0]

    @staticmethod
    def weights(stacked: torch.Tensor, place: int) -> torch.Tensor:
        """Returns what an expert's program reads as a stacked weight, from this rank's share `stacked`.

        place   index of the expert among those that this rank holds
        """
        return stacked

    @staticmethod
    def here(place: int, rows: list[torch.Tensor], made: int | None) -> Any:
        """Returns what replaces `Here` in an expert's program; arguments as of `ExpertProgram.run` and its `made`."""
        return place

    @staticmethod
    def given(tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
        """Returns rows (n, ...) with a dim of size 1 at `dim`, if not None, as an expert's program reads them."""
        return tensor

    @staticmethod
    def result(result: torch.Tensor, made: int | None) -> torch.Tensor:
        """Returns the result of a program as rows (n, ...), without the dims that `made` describes."""
        return result


@dataclass(frozen=True)
class AllExperts(OneExpert):
    """The forward uses all experts at once, in tensors with a dim of size E.

    dim   the dim of the weight or result that counts experts;  expert  not used
    """

    expert: int = -1
    dim: int = 0
    kind = "every"

    def same(self, other: Any) -> bool:
        return isinstance(other, AllExperts)

    def has_rows(self, tensor: torch.Tensor, dim: int | None, made: torch.Tensor) -> bool:
        own, theirs = list(tensor.shape), list(made.shape)
        del theirs[self.dim]
        if dim is not None:
            del own[dim]
        return bool(own and theirs) and own[0] == theirs[0]

    def calls(self, leaves: list[torch.Tensor], dims: Sequence[int | None], experts: int) -> Calls:
        pairs = list(zip(leaves, dims, strict=True))
        return [
            # `%`: a dim of size 1 is broadcast, so each expert gets its only entry
            (expert, [leaf if dim is None else leaf.select(dim, expert % leaf.shape[dim]) for leaf, dim in pairs])
            for expert in range(experts)
        ]

    def joined(self, results: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(results, self.dim)

    @staticmethod
    def weights(stacked: torch.Tensor, place: int) -> torch.Tensor:
        return stacked.narrow(0, place, 1)

    @staticmethod
    def given(tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
        return tensor if dim is None else tensor.unsqueeze(dim)

    @staticmethod
    def result(result: torch.Tensor, made: int | None) -> torch.Tensor:
        assert made is not None
        return result.squeeze(made)


@dataclass(frozen=True, eq=False)
class SortedRows(OneExpert):
    """The forward has rows sorted by expert; `offsets` (E,): the rows of expert e end before offsets[e]."""

    expert: int = -1
    offsets: Any = None
    kind = "sorted"

    def same(self, other: Any) -> bool:
        if not isinstance(other, SortedRows):
            return False
        return self.offsets is other.offsets or torch.equal(self.offsets, other.offsets)

    def calls(self, leaves: list[torch.Tensor], dims: Sequence[int | None], experts: int) -> Calls:
        stops = self.offsets.tolist()
        spans = [(start, stop) for start, stop in zip([0, *stops[:-1]], stops, strict=True)]
        return [(e, [leaf[a:b] for leaf in leaves]) for e, (a, b) in enumerate(spans) if b > a]

    def joined(self, results: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(results)


@dataclass(frozen=True, eq=False)
class PickedExperts(OneExpert):
    """The forward indexes weights with a tensor of experts, by which each row may pick several.

    index     (rows, ...) expert indices, negative ones count from the end;  experts  the number E
    made_dim  the number of dims of `index`
    """

    expert: int = -1
    index: Any = None
    experts: int = 0
    kind = "picked"

    @property
    def _flat(self) -> torch.Tensor:
        """Returns the index as 1-d, with negative entries made non-negative."""
        flat = self.index.reshape(-1)
        return torch.where(flat < 0, flat + self.experts, flat)

    def same(self, other: Any) -> bool:
        if not isinstance(other, PickedExperts) or self.index.shape != other.index.shape:
            return False
        return self.index is other.index or torch.equal(self._flat, other._flat)

    def fits(self, form: torch.Tensor, before: Sequence[torch.Tensor]) -> bool:
        return form.shape[: self.index.dim()] == self.index.shape

    def has_rows(self, tensor: torch.Tensor, dim: int | None, made: torch.Tensor) -> bool:
        return tensor.dim() > 1 and tensor.shape[0] == self.index.shape[0]

    def calls(self, leaves: list[torch.Tensor], dims: Sequence[int | None], experts: int) -> Calls:
        flat = self._flat
        order = flat.argsort(stable=True)
        counts = flat.bincount(minlength=experts).tolist()
        places = torch.unravel_index(order, self.index.shape)
        pieces = [self._rows(leaf, places).split(counts) for leaf in leaves]
        return [(e, [piece[e] for piece in pieces]) for e, count in enumerate(counts) if count]

    def _rows(self, leaf: torch.Tensor, places: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns (n, 1, ..., features), the entries of `leaf` at n positions of the index, with as many dims as it.

        places  for each dim of the index, the positions (n,) along it
        The leading dims of `leaf` correspond to those of the index as long as sizes agree or are 1; never its last dim.
        """
        dims = 0
        while dims < min(len(places), leaf.dim() - 1) and leaf.shape[dims] in (1, self.index.shape[dims]):
            dims += 1
        at = tuple(place if leaf.shape[dim] > 1 else place * 0 for dim, place in enumerate(places[:dims]))
        return leaf[at].reshape(len(places[0]), *(1,) * (dims - 1), *leaf.shape[dims:])

    def joined(self, results: list[torch.Tensor]) -> torch.Tensor:
        order = self._flat.argsort(stable=True)
        done = torch.cat(results)
        return done[order.argsort()].view(*self.index.shape, *done.shape[1:])

    @staticmethod
    def here(place: int, rows: list[torch.Tensor], made: int | None) -> Any:
        assert made is not None
        count = rows[0].shape[0]
        return torch.full((count, *(1,) * (made - 1)), place, device=rows[0].device)

    @staticmethod
    def result(result: torch.Tensor, made: int | None) -> torch.Tensor:
        assert made is not None
        return result.reshape(result.shape[0], *result.shape[made:])


WAYS: dict[str, type[OneExpert]] = {way.kind: way for way in (OneExpert, AllExperts, SortedRows, PickedExperts)}
