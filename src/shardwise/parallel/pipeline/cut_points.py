"""Find where a forward can be split into stages, choose the best places by cost, and refuse too many stages.

A cut point is the entry of a submodule. Every tensor that depends on parameters and crosses that moment (trace/flow)
must be an argument of that submodule, or an argument or result of a call before. It can then be sent to the next
stage, and written there into the tensor that the same call holds. Tensors that do not depend on parameters (masks,
positions, rotary tables) are computed on every stage by the model's own code.

    embed . block 0 . block 1 | block 2 . block 3 | norm . head
                               ^ sent: the arguments of block 2 that depend on parameters

An encoder's output, which every decoder block gets as an argument, is sent too, as is a skip connection of a U-Net,
which is the result of an earlier call. Places that need only arguments of the call ("clean") are preferred, unless
others make the slowest stage faster by a fifth. A value that a caller computes and passes to no module is identified
by the torch function that made it; places that need no such value are preferred if there are enough.

Among places, those are chosen that make the slowest stage fastest (floating-point operations and elements moved, from
a forward on fake tensors, embedding and head included) and, within 5% of that, the largest stage smallest.

What this does not do: cut inside a submodule in which no other submodule is entered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from shardwise.errors import InputError, RefusedPlan, did_you_mean
from shardwise.parallel.pipeline.balance import Prefix, Used, balanced, costs_of, uses, uses_led
from shardwise.parallel.pipeline.boundaries import CutPoint, Edge, Holder, Stage
from shardwise.parallel.pipeline.chance import met_always, met_by_chance
from shardwise.parallel.pipeline.hooks import BACKWARD_HOOK, hooked_in_backward
from shardwise.parallel.pipeline.inner import blocked, crossed, crossed_at, found_by
from shardwise.parallel.pipeline.lasting import conflict, told_lasting, told_written, twin_of
from shardwise.parallel.pipeline.skips import Skip, skips_between
from shardwise.trace.flow import Flow, ModuleCall

WORTH = 0.8  # less preferred places are taken if they reduce the slowest stage's cost below this fraction


def find_places(
    flow: Flow, *, own: bool = False, functions: bool = False
) -> tuple[list[CutPoint], list[tuple[ModuleCall, int]]]:
    """Returns (cut points in order, [(call where no stage can begin, number of a crossing tensor without holder)]).

    own        whether values that a caller's own code keeps count as held
    functions  whether cut points are calls of torch functions by forwards' own code, in place of submodules
    """
    places, others = [], []
    callers = {(call.path, call.place): call for call in (flow.root, *flow.calls())}
    for call, crossing in flow.crossings(functions=functions):
        missing = [number for number in crossing if _holder(flow, call, number, [], own=own) is None]
        # a gradient that the forward computes may cross back, and needs a tensor that the stage before must have
        if crossing and not missing and (unknown := blocked(flow, call, crossing)) is not None:
            missing = [unknown]
        # a stage that began where gradients are off would switch them on there; all uses of a weight or buffer that
        # the forward writes must be in one stage (`test_no_stage_begins_between_two_uses_of_what_is_written`)
        off = (call.path, call.place, call.own and call.own[0]) in flow.without_gradient
        if off or flow.written_around(call.enter) is not None or flow.rewritten_after(call.enter):
            continue
        if missing:
            others.append((call, missing[0]))
        elif crossing:  # else no tensor that depends on parameters crosses, so the stage before would train nothing
            callees = {inner.path for inner in callers[call.path, call.place].inside} if functions else ()
            places.append(CutPoint(call, tuple(crossing), tuple(sorted(callees))))
    usable = met_always(flow, _lasting(flow, _usable(flow, places), own=own))
    return met_by_chance(flow, usable, places), others


def _lasting(flow: Flow, places: list[CutPoint], *, own: bool) -> list[CutPoint]:
    """Returns the places where later forwards send the same tensors, and find state that earlier ones left there.

    `runs_on` of these is set. own   as in `find_places`
    """
    lasting = []
    for place in places:
        runs_on, why = conflict(flow, place.call)
        if not why and _same_crossing(flow, place, own=own):
            lasting.append(replace(place, runs_on=runs_on))
    return lasting


def _same_crossing(flow: Flow, place: CutPoint, *, own: bool) -> bool:
    """Whether tensors with the same holders cross the place in every later forward."""
    expected = {_holder(flow, place.call, number, [], own=own) for number in place.numbers}
    for later in flow.later:
        twin = twin_of(place.call, later)
        assert twin is not None
        if {_holder(later, twin, number, [], own=own) for number in later.crossing_at(twin.enter)} != expected:
            return False
    return True


def _holder(
    flow: Flow, boundary: ModuleCall, number: int, skips: Sequence[Skip], *, own: bool = True
) -> Holder | None:  # fmt: skip
    """Returns the holder of tensor `number` when `boundary` is entered, on a stage that leaves out `skips`.

    None if it has none, which is a value that a caller's code computed and passed to no module, unless `own` is set.
    """
    if number in boundary.arguments:
        return Holder(boundary.path, boundary.place, True, boundary.arguments.index(number))
    as_argument = None
    for call, is_argument, leaf in flow.call_leaves.get(number, ()):
        time = call.enter if is_argument else call.exit
        # a tensor inside a left-out call does not exist, but that call's own result does, as a made-up tensor
        hidden = any(skip.call.enter < call.enter and call.exit < skip.call.exit for skip in skips)
        if time > boundary.enter or hidden:
            continue
        if not is_argument:
            return Holder(call.path, call.place, False, leaf)
        as_argument = as_argument or Holder(call.path, call.place, True, leaf)
    return as_argument if as_argument is not None or not own else _kept_by_a_caller(flow, boundary, number)


def _kept_by_a_caller(flow: Flow, boundary: ModuleCall, number: int) -> Holder | None:
    """Returns the holder of a tensor made by a caller's own code around `boundary`, which both stages run; or None."""
    made = flow.own.get(number)
    if made is None or not made.whose.enter <= boundary.enter < made.whose.exit:
        return None
    callees = tuple(sorted({call.path for call in made.whose.inside}))
    own, at = (made.place, made.name), (made.whose.path, made.whose.place)
    return Holder(*at, False, made.leaf, False, own, callees, flow.times(made, boundary.enter))


def _usable(flow: Flow, places: list[CutPoint]) -> list[CutPoint]:
    """Returns the outermost of places with no operation in between, without places where no stage can begin.

    No stage begins inside code that has read a value that depends on parameters, or before any parameter was used.
    """
    decided = decisions(flow)
    costs = costs_of(flow)
    times = [time for time, _ in uses(flow)]
    count = Prefix(times, [1.0] * len(times))
    kept: list[CutPoint] = []
    for place in places:
        moment = place.call.enter
        before = kept[-1].call.enter if kept else 0
        # without cost since the last place, it is the first submodule of a module that was just entered; without a
        # parameter used so far, the stage before could not train
        new = costs.between(before, moment) > 0 and count.between(0, moment) > 0
        # the next stage runs such code from its beginning, but lacks the value that it reads
        if new and not any(owner.enter <= time < moment < owner.exit for time, owner in decided):
            kept.append(place)
    return kept


def decisions(flow: Flow) -> list[tuple[int, ModuleCall]]:
    """Returns (time, innermost module call) of each read in Python of a value that depends on parameters.

    Backwards that the forward runs to fill `.grad` are included, since they would fail on a stage without its inputs.
    Reads of random values are not, since every stage draws the same.
    """
    times = [op.time for op in flow.ops if op.reads_value and any(flow.depends[n] for n in op.reads)]
    return [(time, flow.around(time)) for time in (*times, *flow.backwards)]


def choose(
    flow: Flow, module: nn.Module, count: int, named: Sequence[str], units: Sequence[str], apart: str = ""
) -> list[CutPoint]:  # fmt: skip
    """Returns the `count` - 1 places at which the stages after the first begin.

    named   paths of the modules at which the user wants stages to begin, in order; () lets them be chosen
    units   paths of modules inside which no stage may begin (sharded, recomputed or compiled as one)
    apart   why no gradient that the forward itself computes may go back over a place; "" if it may
    Raises `RefusedPlan` if there are too few places, `InputError` for a name that is no module.
    """
    units = [*units, *hooked_in_backward(module)]
    tiers: list[list[CutPoint]] = []  # supersets, first those places where all that crosses is an argument
    for own in (False, True):
        places, others = find_places(flow, own=own)
        places = [place for place in _outside(places, units) if not (apart and crossed_at(flow, place))]
        # if a named module is no place, `_named` needs the places with `own` to tell the reason
        if named and (own or {place.call.path for place in places} >= set(named)):
            return _named(flow, module, places, others, named)
        tiers += [places] if own else [[place for place in places if place.clean], places]
    best = _best(flow, module, _of_fixed_sizes(flow, tiers), count)
    if not best and count > 1:  # as a last resort, at calls of torch functions by a module's own code
        between = _outside(find_places(flow, own=True, functions=True)[0], units)
        between = [place for place in between if not (apart and crossed_at(flow, place))]
        best = _best(flow, module, _of_fixed_sizes(flow, [between]), count)
        # then places where sizes depend on values, which may turn out in the first step to be no place
        best = best or _best(flow, module, tiers, count) or _best(flow, module, [between], count)
    if not best and len(places) < count - 1:
        raise RefusedPlan(_too_few(flow, module, places, others, count) + apart)
    if not best and count > 1:
        raise RefusedPlan(
            f"{count} stages leave one without a trainable parameter, wherever the forward is cut: use fewer stages"
        )
    return best


def _of_fixed_sizes(flow: Flow, tiers: list[list[CutPoint]]) -> list[list[CutPoint]]:
    """Returns each list without places where the size of a crossing tensor depends on values."""
    return [[place for place in tier if flow.sized.isdisjoint(place.numbers)] for tier in tiers]


def _outside(places: list[CutPoint], units: Sequence[str]) -> list[CutPoint]:
    """Returns the places that are not inside one of the modules `units`."""

    def inside(call: ModuleCall, unit: str) -> bool:
        """Whether a call is made inside the module at path `unit`."""
        return call.path.startswith(f"{unit}.") or (call.own is not None and call.path == unit)

    return [place for place in places if not any(inside(place.call, unit) for unit in units)]


def _best(flow: Flow, module: nn.Module, tiers: list[list[CutPoint]], count: int) -> list[CutPoint]:
    """Returns the best `count` - 1 places of several lists, each a superset of those before; [] if they are too few."""
    # all uses second, since a user's autograd function may detach a parameter inside and yet give it a gradient
    for trained in (uses_led, uses):
        if best := _best_of(flow, module, tiers, count, trained):
            return best
    return []


def _best_of(
    flow: Flow, module: nn.Module, tiers: list[list[CutPoint]], count: int, trained: Used
) -> list[CutPoint]:  # fmt: skip
    """Returns the best places of the first tier; of a later one if its slowest stage is much faster (`WORTH`).

    trained   lists the uses of parameters, of which each stage must have one
    """
    most, best = float("inf"), list[CutPoint]()
    apart = [[place for place in tier if not crossed_at(flow, place)] for tier in tiers] if flow.taken else []
    for tier in (*apart, *tiers):  # first without places over which a gradient of the forward goes back
        moments = [place.call.enter for place in tier]
        cost, which = balanced(flow, module, moments, count, trained) if len(tier) >= count - 1 else (most, [])
        if which and (not best or cost < most * WORTH):
            most, best = cost, [tier[index] for index in which]
    return best


def _too_few(
    flow: Flow, module: nn.Module, places: list[CutPoint], others: list[tuple[ModuleCall, int]], count: int
) -> str:  # fmt: skip
    """Returns the message for a forward with fewer than `count` - 1 places, with the reason why there are no more."""
    needed = "a place" if count == 2 else f"{count - 1} places"
    listed = f"{len(places)}: " + ", ".join(f"'{place.call.path}'" for place in places)
    if not places:
        listed = (
            "none: a stage begins where a submodule, or a function of torch by a module's own code, is called with "
            "what was computed before"
        )
    why = _in_the_way(flow, module, places, others)
    return f"{count} stages need {needed} to cut the forward, and it has {listed}{why}"


def _in_the_way(flow: Flow, module: nn.Module, places: list[CutPoint], others: list[tuple[ModuleCall, int]]) -> str:
    """Returns why no stage can begin elsewhere, as sentences to append, or ""."""
    if flow.repeats:
        return (
            f". It calls '{min(flow.repeats)}' as often as there are samples, or as their values say, and no stage "
            "begins among such calls: it begins at a module called outside of them, which is given all that is used"
        )
    # a gradient that the forward takes itself must be taken within one stage
    if flow.backwards or not all(taken.plain for taken in flow.taken):
        return (
            ". It takes gradients itself by other means than torch.autograd.grad(outputs, inputs), such as "
            "loss.backward(), and what they are taken of is computed, and differentiated, in one stage"
        )
    why = ""  # a later reason replaces an earlier one, since it bars more places
    last = places[-1].call.enter if places else 0
    if missed := [(call, number) for call, number in others if call.enter > last] or others:
        call, number = missed[-1]
        why = (
            f". Elsewhere a module keeps to itself what is read later: at '{call.path}', {_made_in(flow, number)} is "
            "used again, and no module is given it or gives it"
        )
    if around := next(iter(hooked_in_backward(module)), ""):
        why = f". None begins in '{around}', {BACKWARD_HOOK}"
    if any(owner is flow.root for _, owner in decisions(flow)):
        why = ". The outermost forward decides by a value that depends on parameters: stages cannot share it"
    written = next(filter(None, (told_written(flow, module, call) for call in flow.calls())), "")
    return why + (f". Elsewhere {written}" if written else told_lasting(flow))


def _made_in(flow: Flow, number: int) -> str:
    """Returns the name of tensor `number` in messages, by the module that made it."""
    maker = flow.maker(number)
    return f"a tensor made in '{maker}'" if maker else "a tensor made in the outermost forward"


def _named(
    flow: Flow, module: nn.Module, places: list[CutPoint], others: list[tuple[ModuleCall, int]], named: Sequence[str]
) -> list[CutPoint]:
    """Returns the place at each module in `named`. Raises `InputError`, or `RefusedPlan` with the reason.

    places, others   as `find_places` returns them
    """
    paths = {path for path, _ in module.named_modules() if path}
    by_path: dict[str, CutPoint] = {}
    for place in places:
        # a module that is called several times begins a stage at its first call
        by_path.setdefault(place.call.path, place)
    chosen = []
    for name in named:
        if name not in paths:
            near = (
                did_you_mean(name, sorted(paths)) or f"; stages may begin at {', '.join(list(by_path)[:6]) or 'none'}"
            )
            raise InputError(f"plan: stages names '{name}', which is no module{near}")
        if name not in by_path:
            blocked = next(((c, n) for c, n in others if c.path == name), None)
            why = "it does not begin a part of the forward with parameters before it and after it"
            if blocked is not None:
                why = f"{_made_in(flow, blocked[1])} is used after it, and no module is given it or gives it"
            # if a more particular reason applies, it replaces the one before
            around = next((path for path in hooked_in_backward(module) if name.startswith(f"{path}.")), "")
            why = why if not around else f"it lies in '{around}', {BACKWARD_HOOK}"
            written = (told_written(flow, module, call) for call in flow.calls() if call.path == name)
            why = next(filter(None, written), why)
            raise RefusedPlan(f"plan: no stage can begin at '{name}': {why}; places: {', '.join(by_path)}")
        chosen.append(by_path[name])
    # compares times of entry, which also finds a place that is named twice
    if [p.call.enter for p in chosen] != sorted({p.call.enter for p in chosen}):
        raise InputError(f"plan: stages={'|'.join(named)} must name modules in the order in which they run, each once")
    return chosen


def make_stages(flow: Flow, other: Flow, samples: tuple[int, int], places: list[CutPoint]) -> list[Stage]:
    """Returns the stages that begin at the start and at each of `places`.

    other    the same forward on another number of samples
    samples  (number of samples in `flow`, in `other`)
    Raises `RefusedPlan` if the two forwards call different modules, or a stage has no holder for a crossing tensor.
    """
    # calls repeated for each sample may differ in number, and no stage begins among them (`repeats`)
    if flow.order != other.order and not flow.repeats:
        raise RefusedPlan(
            "the forward runs other modules from one time to the next (a choice by values of its samples, or by their "
            "number), so that stages would not meet: a pipeline needs one order of modules, of which draws may leave "
            "some out"
        )
    edges: list[CutPoint | None] = [None, *places, None]
    times = [0, *[place.call.enter for place in places], flow.end]
    stages = []
    for index in range(len(times) - 1):
        start, stop = times[index], times[index + 1]
        ops = [op for op in flow.ops if start <= op.time < stop and not op.inner]
        stage = Stage(
            index,
            edges[index],
            edges[index + 1],
            start,
            stop,
            {flow.parameters[n] for op in ops for n in op.reads if n in flow.parameters},
            {flow.buffers[n] for op in ops for n in op.reads if n in flow.buffers},
            sum(op.cost for op in ops),
        )
        if stage.exit is None:  # a parameter that the model returns (a learned temperature) is read by no operation
            stage.parameters |= {flow.parameters[n] for n in flow.returned if n in flow.parameters}
        written = any(0 <= flow.made[number] < start for number in flow.parameters)
        stage.careful = written or bool(flow.later)  # a forward that failed and ran again would change state twice
        entry = -math.inf if stage.entry is None else stage.entry.call.enter
        stage.skips = skips_between(-math.inf, entry, flow, other, samples)
        # if code behind the exit changes state that a later forward reads (`lasting`), the stage runs that code too
        stage.runs_on = stage.exit is not None and stage.exit.runs_on
        if stage.exit is not None and stage.runs_on:
            stage.skips += skips_between(stage.exit.call.enter, math.inf, flow, other, samples)
        for later in flow.later:  # for example a layer's memory, which is read from the second forward on
            _add_used(stage, later)
        stage.entries, stage.exits = _edges(flow, stage, stage.entry), _edges(flow, stage, stage.exit)
        stage.received = [*stage.entries[0].holders] if stage.entries else []
        stage.sent = [*stage.exits[0].holders] if stage.exits else []
        _take_part(flow, stage)
        stages.append(stage)
    return stages


def _add_used(stage: Stage, later: Flow) -> None:
    """Adds to the stage the parameters and buffers that it uses in a later forward."""
    start, stop = 0, later.end + 1
    # if the later forward does not call the module (a dropped layer), the stage is taken to extend to that side's end
    if stage.entry is not None and (twin := twin_of(stage.entry.call, later)) is not None:
        start = twin.enter
    if stage.exit is not None and (twin := twin_of(stage.exit.call, later)) is not None:
        stop = twin.enter
    for op in later.ops:
        # an operation inside another one reads nothing of the module by itself
        if start <= op.time < stop and not op.inner:
            stage.parameters |= {later.parameters[n] for n in op.reads if n in later.parameters}
            stage.buffers |= {later.buffers[n] for n in op.reads if n in later.buffers}


def _take_part(flow: Flow, stage: Stage) -> None:
    """Sets the stage's `taken`, `differentiates`, `over`, `answers`, `by`, on gradients that the forward computes."""
    stage.taken, stage.differentiates = flow.taken, bool(flow.taken or flow.backwards)
    if stage.entry is not None:
        stage.over = frozenset(crossed(flow, stage.entry.call, stage.entry.numbers))
    stage.answers = stage.exit is not None and crossed_at(flow, stage.exit)
    stage.by = found_by(flow, stage.stop, stage.entry, stage.skips, stage.exit)


def _edges(flow: Flow, stage: Stage, boundary: CutPoint | None) -> list[Edge]:
    """Returns an `Edge` for `boundary`, and for each place that may replace it; [] for None."""
    points = [boundary, *boundary.others] if boundary is not None else []
    return [Edge(point, tuple(_holders(flow, stage, point))) for point in points]


def _holders(flow: Flow, stage: Stage, boundary: CutPoint | None) -> list[Holder]:
    """Returns a holder for each tensor that crosses a stage's boundary; raises `RefusedPlan` if one has none."""
    holders = []
    for number in boundary.numbers if boundary is not None else ():
        assert boundary is not None
        holder = _holder(flow, boundary.call, number, stage.skips)
        if holder is None:
            raise RefusedPlan(
                f"stage {stage.index} cannot take hold of {_made_in(flow, number)}, which is used after "
                f"{boundary.call.label} is entered: name other places with stages="
            )
        holders.append(replace(holder, written=number in flow.overwritten))
    return holders
