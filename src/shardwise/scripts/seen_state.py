"""`optimizer.state`, as a script's own code finds it where ranks hold pieces.

    optimizer.state[p]      p of model.parameters(): the whole state, gathered once in a step; of what the script writes
                            into it, each rank takes its piece before the optimizer steps
    optimizer.state[piece]  piece of optimizer.param_groups: this rank's, watched as the pieces themselves are

What this does not do: compare over ranks what they write, which every rank writes alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from shardwise.scripts.guard import Gate
from shardwise.scripts.saying import names_line
from shardwise.scripts.state import put
from shardwise.step.state import RankState

Seen = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (tensor of a piece's state, piece) -> as a script sees it


class SeenState(MutableMapping[Any, Any]):
    """Takes the place of an optimizer's `state` while the script's own code runs; `raw` is what the optimizer has."""

    def __init__(
        self, optimizer: Optimizer, engine_state: RankState, gate: Gate, meet: Callable[[str], None],
        gather: Callable[[], Iterator[tuple[str, dict[Any, Any]]]], seen: Seen,
        plainly: Callable[[], AbstractContextManager[None]],
    ) -> None:  # fmt: skip
        """
        gather  every parameter's whole state; collective
        plainly a context in which the optimizer finds its own, behind which another `SeenState` stands
        seen    watches what a piece's state is used for
        """
        self._optimizer, self.raw = optimizer, optimizer.state
        self._state, self._gate, self._meet, self._gather, self._seen = engine_state, gate, meet, gather, seen
        held = dict(engine_state.module.named_parameters())
        self._plainly = plainly
        self._names = {id(held[name]): name for name in engine_state.names}
        self._whole: dict[str, dict[Any, Any]] | None = None  # by name, as the script has changed it
        optimizer.state = self

    def leave(self) -> None:
        """Give the optimizer back what it has, with what the script has changed. Nothing is sent."""
        if self._optimizer.state is not self:
            return  # the script has put another in its place
        self._optimizer.state = self.raw
        if self._whole is not None:
            names = {key: value for key, value in self.raw.items() if not isinstance(key, torch.Tensor)}
            put(self._state, self._optimizer, self._whole, rest=names)

    def _name(self, key: Any) -> str | None:
        """The parameter of the model that a key is, while the script asks."""
        key = key.__dict__.get("successor", key) if isinstance(key, torch.Tensor) else key
        return None if self._gate.is_open else self._names.get(id(key))

    @property
    @names_line
    def _of_all(self) -> dict[str, dict[Any, Any]]:
        """The whole state of every parameter that has one. Collective, the first time in a step."""
        if self._whole is None:
            self._meet("optimizer.state of a parameter")
            with self._gate.open():
                found = {name: dict(state) for name, state in self._gather() if state}
            self._whole = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), found)
        return self._whole

    def __getitem__(self, key: Any) -> Any:
        name = self._name(key)
        if name is not None:
            return self._of_all.setdefault(name, {})
        if self._whole is not None and not self._gate.is_open and self._optimizer.state is self:
            with self._plainly():  # pieces are as the script has changed the whole
                pass
            return self._optimizer.state[key]
        found = self.raw[key]
        watched = isinstance(key, torch.Tensor) and isinstance(found, dict) and not self._gate.is_open
        return _OfPiece(found, lambda tensor: self._seen(tensor, key)) if watched else found

    def __setitem__(self, key: Any, value: Any) -> None:
        name = self._name(key)
        if name is None:
            self.raw[key] = value
        else:
            self._of_all[name] = value

    def __delitem__(self, key: Any) -> None:
        name = self._name(key)
        if name is None:
            del self.raw[key]
        else:
            del self._of_all[name]

    def __contains__(self, key: Any) -> bool:
        name = self._name(key)
        return key in self.raw if name is None else name in self._of_all

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self.raw))

    def __len__(self) -> int:
        return len(self.raw)

    def get(self, key: Any, default: Any = None) -> Any:
        """Returns the state of a parameter or piece, or `default`."""
        return self[key] if key in self else default  # noqa: SIM401  # which would make a state of what has none

    def clear(self) -> None:
        """Forget all state."""
        self.raw.clear()
        self._whole = None


class _OfPiece(MutableMapping[Any, Any]):
    """The state of one piece, whose tensors are watched in the script's hands."""

    def __init__(self, raw: dict[Any, Any], seen: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._raw, self._seen = raw, seen

    def __getitem__(self, key: Any) -> Any:
        found = self._raw[key]
        return self._seen(found) if isinstance(found, torch.Tensor) and found.dim() else found

    def __setitem__(self, key: Any, value: Any) -> None:
        self._raw[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._raw[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)
