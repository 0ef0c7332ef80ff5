"""The ways in which a forward picks stacked weights (E, ...), and the rows that each expert is given by them.

    OneExpert      w[e]                   the rows that meet it
    AllExperts     rows with a dim of E   an expert's own along it, or all rows where they have no such dim
    SortedRows     a grouped product      those between its offset and the one before
    PickedExperts  w[index]               those whose index names it

Each says, for the rank that has rows, which expert is given which (`calls`), and how results make one tensor
(`joined`); for the rank that holds an expert, what stands for weights, rows and place in its operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

Calls = list[tuple[int, list[torch.Tensor]]]  # (expert, its tensors of rows (n, ...))


@dataclass(frozen=True)
class Here:
    """The place of an expert among those that a rank holds, where an operation is written down."""


def get_one(stacked: torch.Tensor, place: int, rest: tuple = ()) -> torch.Tensor:
    """Returns `stacked[place, *rest]`."""
    return stacked[(place, *rest)]


def product_of_sorted(rows: torch.Tensor, stacked: torch.Tensor, place: int) -> torch.Tensor:
    """Returns an expert's part of a grouped product: rows (n, H) with the matrix (H, I) at `place`."""
    return rows @ stacked[place]


@dataclass(frozen=True)
class OneExpert:
    """The weights of one expert, `expert`."""

    expert: int
    kind = "one"
    made_dim: int | None = None

    def same(self, other: Any) -> bool:
        """Returns whether the other picks the same weights."""
        return self == other

    def fits(self, form: torch.Tensor, before: Sequence[torch.Tensor]) -> bool:
        """Returns whether a result has the rows of one of the tensors `before`."""
        return form.dim() > 0 and any(t.dim() > 0 and t.shape[0] == form.shape[0] for t in before)

    def has_rows(self, tensor: torch.Tensor, dim: int | None, made: torch.Tensor) -> bool:
        """Returns whether a tensor has one row for each of what experts made; `dim`: which counts experts, if any."""
        return tensor.dim() > 0 and tensor.shape[0] == made.shape[0]

    def calls(self, leaves: list[torch.Tensor], dims: Sequence[int | None], experts: int) -> Calls:
        """Returns which expert is given which rows."""
        return [(self.expert, leaves)]

    def joined(self, results: list[torch.Tensor]) -> torch.Tensor:
        """Returns one tensor of the results of all calls."""
        return results[0]

    @staticmethod
    def weights(stacked: torch.Tensor, place: int) -> torch.Tensor:
        """Returns what an expert's operations read as the stacked weight; `place`: of the expert among those here."""
        return stacked

    @staticmethod
    def here(place: int, rows: list[torch.Tensor], made: int | None) -> Any:
        """Returns what stands where the forward names the expert."""
        return place

    @staticmethod
    def given(tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
        """Returns rows as an expert's operations read them."""
        return tensor

    @staticmethod
    def result(result: torch.Tensor, made: int | None) -> torch.Tensor:
        """Returns an expert's results as rows (n, ...)."""
        return result


@dataclass(frozen=True)
class AllExperts(OneExpert):
    """All experts at once: `dim` of a tensor counts them."""

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
            # of one that is broadcast over experts, each gets all
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
    """Rows in the order of their experts: those of expert e end at `offsets[e]`."""

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
    """Weights by `index` (rows, ...), whose first dim counts rows; each row may pick several."""

    expert: int = -1
    index: Any = None
    experts: int = 0
    kind = "picked"

    @property
    def _flat(self) -> torch.Tensor:
        """Returns the index in one dim, those that count from the end counted from the first."""
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
        """Returns (n, 1, ..., features) the elements of a tensor at the places of the index, dims as many as it has.

        Its first dims are those of the index, as far as sizes say so; the last one is never taken for one of these.
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
