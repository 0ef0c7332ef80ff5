"""What a forward changes outside its module is known by name and put back."""

from __future__ import annotations

import dis
from functools import partial
from typing import Any

import remembering_tasks
import torch
from torch import nn

from shardwise.trace.module_state import ModuleState
from shardwise.trace.outside_state import DEEP, MOST, _names


class Rows:
    """A hook that is an object."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.rows.append(output)


def kept(store: dict, module: nn.Module, args: Any) -> None:
    store["last"] = args


def test_globals_classes_closures_defaults_and_stores_of_hooks_are_put_back() -> None:
    # other tests of this process may have run such forwards
    remembering_tasks.FORWARDS[:], remembering_tasks.Outside.seen = [0], 0
    for left in (remembering_tasks.STORE, remembering_tasks.noted.__defaults__[0]):  # type: ignore[index]
        left.clear()
    module, rows, store = remembering_tasks.Outside(), Rows(), dict[str, Any]()
    module.register_forward_hook(rows)
    module.head.register_forward_pre_hook(partial(kept, store))
    state = ModuleState(module)
    module(torch.ones(2, remembering_tasks.WIDTH))
    remembering_tasks.Outside.late = 3  # type: ignore[attr-defined]
    remembering_tasks.Outside.first = Logger(0)  # type: ignore[attr-defined]
    assert state.outside is not None
    names = {"FORWARDS", "STORE", "seen", "count", "a default of noted", "Rows", "partial", "late", "first"}
    assert names <= set(state.outside.changed())
    state.restore()
    assert (remembering_tasks.FORWARDS, remembering_tasks.STORE, remembering_tasks.Outside.seen) == ([0], {}, 0)
    assert not (rows.rows or store or remembering_tasks.noted.__defaults__[0])  # type: ignore[index]
    assert not {"late", "first"} & vars(remembering_tasks.Outside).keys() and not state.outside.changed()


class Logger:
    """Holds what half a program made, and a data set."""

    def __init__(self, objects: int) -> None:
        self.inside = [[number] for number in range(objects)]
        self.data = torch.zeros(MOST + 1)


def test_what_is_data_and_what_lies_behind_many_objects_is_left_as_it_is() -> None:
    module, logger = nn.Linear(2, 2), Logger(3 * DEEP)
    module.register_forward_hook(partial(kept, {"logger": logger}))
    state = ModuleState(module)
    assert state.outside is not None
    logger.inside.append([0])
    logger.inside[-2].append(0)
    logger.data += 1
    state.restore()
    assert len(logger.inside) == 3 * DEEP  # among the first objects
    assert len(logger.inside[-1]) == 2 and logger.data.all()


def test_names_are_those_of_the_disassembly_however_many_there_are() -> None:
    """More than 256 names need arguments of two bytes, whose higher one comes before."""
    lines = ["def many(thing):", " global " + ", ".join(f"g{at}" for at in range(400))]
    lines += [f" g{at} = thing.read{at}; thing.kept{at} = 1" for at in range(400)] + [" del thing.gone"]
    code = compile("\n".join(lines), "made", "exec").co_consts[0]
    used, assigned = _names(code)
    told = {op.argval for op in dis.get_instructions(code) if op.opname.startswith(("STORE_", "DELETE_"))}
    assert assigned == told and len(told) == 801 and "gone" in told
    assert {"read399", "kept399"} <= used and "read0" not in assigned
