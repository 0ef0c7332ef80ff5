"""Find where a forward can be cut into stages, and best is (by cost); refuse too many stages. Crosses: trace/flow.

A place to cut is the entry of a submodule, if everything that depends on parameters and crosses that moment can be
taken hold of: it is an argument of that submodule, or the argument or result of one that was called before. It can
then be sent to the next stage, and put there into the tensor that the same call holds. What does not depend on
parameters (masks, positions, rotary tables) every stage computes for itself, by the model's own code.

    embed . block 0 . block 1 | block 2 . block 3 | norm . head
                               ^ sent: the arguments of block 2 that depend on parameters

An encoder's output that every decoder block is given is an argument, and travels along; a skip connection of a U-Net
is the result of a call before, and travels along. Places that need only arguments are preferred, unless the others
make the slowest stage faster by a fifth. A value that a caller computes and keeps to itself is found by the function
of torch that made it; places that need none are taken where there are enough of them.

Of the places, those are taken that make the slowest stage fastest (floating-point operations and elements moved, from
a forward on fake tensors; embedding and head count) and, within 5% of that, the largest stage smallest.

What this does not do: cut inside a submodule that no other submodule is entered in.
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

WORTH = 0.8  # of the slowest stage's time, for which tensors travel that the next module is not given


def find_places(
    flow: Flow, *, own: bool = False, functions: bool = False
) -> tuple[list[CutPoint], list[tuple[ModuleCall, int]]]:
    """Returns (cut points in order, other calls: each with the number of a crossing tensor that nobody holds there).

    own        what a caller's code keeps to itself counts as held too
    functions  cut points are calls of torch's functions by forwards' own code, not of submodules
    """
    places, others = [], []
    callers = {(call.path, call.place): call for call in (flow.root, *flow.calls())}
    for call, crossing in flow.crossings(functions=functions):
        missing = [number for number in crossing if _holder(flow, call, number, [], own=own) is None]
        # a gradient that the forward takes itself may cross too: by a tensor that the stage before must have
        if crossing and not missing and (unknown := blocked(flow, call, crossing)) is not None:
            missing = [unknown]
        # a stage that began where gradients are off would switch them on in the middle; uses of a weight or buffer
        # that the forward writes belong into one stage (`test_no_stage_begins_between_two_uses_of_what_is_written`)
        off = (call.path, call.place, call.own and call.own[0]) in flow.without_gradient
        if off or flow.written_around(call.enter) is not None or flow.rewritten_after(call.enter):
            continue
        if missing:
            others.append((call, missing[0]))
        elif crossing:  # else nothing that depends on parameters crosses
            callees = {inner.path for inner in callers[call.path, call.place].inside} if functions else ()
            places.append(CutPoint(call, tuple(crossing), tuple(sorted(callees))))
    usable = met_always(flow, _lasting(flow, _usable(flow, places), own=own))
    return met_by_chance(flow, usable, places), others


def _lasting(flow: Flow, places: list[CutPoint], *, own: bool) -> list[CutPoint]:
    """Returns the places where later forwards send the same tensors, and find on their stage what earlier ones left."""
    lasting = []
    for place in places:
        runs_on, why = conflict(flow, place.call)
        if not why and _same_crossing(flow, place, own=own):
            lasting.append(replace(place, runs_on=runs_on))
    return lasting


def _same_crossing(flow: Flow, place: CutPoint, *, own: bool) -> bool:
    """Whether the same tensors cross the place in every later forward, by their holders."""
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
    """Returns where a tensor can be taken hold of when `boundary` is entered, on a stage that leaves out `skips`.

    None where nobody holds it: it is a value that a caller computed and kept to itself, and `own` is False.
    """
    if number in boundary.arguments:
        return Holder(boundary.path, boundary.place, True, boundary.arguments.index(number))
    as_argument = None
    for call, is_argument, leaf in flow.call_leaves.get(number, ()):
        time = call.enter if is_argument else call.exit
        # inside a call that is left out; the result of that call itself is made up, and can be taken hold of
        hidden = any(skip.call.enter < call.enter and call.exit < skip.call.exit for skip in skips)
        if time > boundary.enter or hidden:
            continue
        if not is_argument:
            return Holder(call.path, call.place, False, leaf)
        as_argument = as_argument or Holder(call.path, call.place, True, leaf)
    return as_argument if as_argument is not None or not own else _kept_by_a_caller(flow, boundary, number)


def _kept_by_a_caller(flow: Flow, boundary: ModuleCall, number: int) -> Holder | None:
    """Returns the holder of a tensor that code around `boundary` made, which every stage there runs; else None."""
    made = flow.own.get(number)
    if made is None or not made.whose.enter <= boundary.enter < made.whose.exit:
        return None
    callees = tuple(sorted({call.path for call in made.whose.inside}))
    own, at = (made.place, made.name), (made.whose.path, made.whose.place)
    return Holder(*at, False, made.leaf, False, own, callees, flow.times(made, boundary.enter))


def _usable(flow: Flow, places: list[CutPoint]) -> list[CutPoint]:
    """Returns the outermost place of each moment, but none in code that has read a value depending on parameters."""
    decided = decisions(flow)
    costs = costs_of(flow)
    times = [time for time, _ in uses(flow)]
    count = Prefix(times, [1.0] * len(times))
    kept: list[CutPoint] = []
    for place in places:
        moment = place.call.enter
        before = kept[-1].call.enter if kept else 0
        # no cost since the last place: a module and its first submodule are entered at one moment. No parameter used
        # so far: the stage before could not train
        new = costs.between(before, moment) > 0 and count.between(0, moment) > 0
        # the next stage runs such code from its beginning, and lacks the value that it has read
        if new and not any(owner.enter <= time < moment < owner.exit for time, owner in decided):
            kept.append(place)
    return kept


def decisions(flow: Flow) -> list[tuple[int, ModuleCall]]:
    """Returns (time, innermost module call) of each read of a value in Python that depends on parameters.

    And of each backward that the forward runs to fill `.grad`, which would fail on a stage without its inputs. Values
    that depend on chance alone are left out: every stage draws them for itself.
    """
    times = [op.time for op in flow.ops if op.reads_value and any(flow.depends[n] for n in op.reads)]
    return [(time, flow.around(time)) for time in (*times, *flow.backwards)]


def choose(
    flow: Flow, module: nn.Module, count: int, named: Sequence[str], units: Sequence[str], apart: str = ""
) -> list[CutPoint]:  # fmt: skip
    """Returns the places at which `count` stages begin, all but the first.

    named   the user's choice: paths of modules, in order
    units   modules that must not be cut inside (sharded, recomputed or compiled as one)
    apart   why no gradient that the forward takes itself may go back over a place; empty where it may
    Raises `RefusedPlan` where there are too few places, `InputError` for a name that is none.
    """
    units = [*units, *hooked_in_backward(module)]
    tiers: list[list[CutPoint]] = []  # ever more places; first those where the call is given all
    for own in (False, True):
        places, others = find_places(flow, own=own)
        places = [place for place in _outside(places, units) if not (apart and crossed_at(flow, place))]
        # as soon as all that the user named are places, else with the last ones, so that the reason can be told
        if named and (own or {place.call.path for place in places} >= set(named)):
            return _named(flow, module, places, others, named)
        tiers += [places] if own else [[place for place in places if place.clean], places]
    best = _best(flow, module, _of_fixed_sizes(flow, tiers), count)
    if not best and count > 1:  # last: between calls of torch's functions by a module's own code
        between = _outside(find_places(flow, own=True, functions=True)[0], units)
        between = [place for place in between if not (apart and crossed_at(flow, place))]
        best = _best(flow, module, _of_fixed_sizes(flow, [between]), count)
        # a size that hangs on values is no function of its arguments' shapes for certain: the first step may refuse it
        best = best or _best(flow, module, tiers, count) or _best(flow, module, [between], count)
    if not best and len(places) < count - 1:
        raise RefusedPlan(_too_few(flow, module, places, others, count) + apart)
    if not best and count > 1:
        raise RefusedPlan(
            f"{count} stages leave one without a trainable parameter, wherever the forward is cut: use fewer stages"
        )
    return best


def _of_fixed_sizes(flow: Flow, tiers: list[list[CutPoint]]) -> list[list[CutPoint]]:
    """Returns the places, list by list, where all that crosses has a size that the shapes of a batch tell."""
    return [[place for place in tier if flow.sized.isdisjoint(place.numbers)] for tier in tiers]


def _outside(places: list[CutPoint], units: Sequence[str]) -> list[CutPoint]:
    """Returns the places that lie inside none of the units."""

    def inside(call: ModuleCall, unit: str) -> bool:
        return call.path.startswith(f"{unit}.") or (call.own is not None and call.path == unit)

    return [place for place in places if not any(inside(place.call, unit) for unit in units)]


def _best(flow: Flow, module: nn.Module, tiers: list[list[CutPoint]], count: int) -> list[CutPoint]:
    """Returns the best `count` - 1 places of several lists, each a superset of those before; none where too few."""
    # all uses, where too few are led to: an autograd function of the user's may detach inside, and give gradients yet
    for trained in (uses_led, uses):
        if best := _best_of(flow, module, tiers, count, trained):
            return best
    return []


def _best_of(
    flow: Flow, module: nn.Module, tiers: list[list[CutPoint]], count: int, trained: Used
) -> list[CutPoint]:  # fmt: skip
    """Returns the best places of the first tier; of a later one where its slowest stage is much faster (WORTH)."""
    most, best = float("inf"), list[CutPoint]()
    apart = [[place for place in tier if not crossed_at(flow, place)] for tier in tiers] if flow.taken else []
    for tier in (*apart, *tiers):  # places over which no gradient goes back are preferred alike
        moments = [place.call.enter for place in tier]
        cost, which = balanced(flow, module, moments, count, trained) if len(tier) >= count - 1 else (most, [])
        if which and (not best or cost < most * WORTH):
            most, best = cost, [tier[index] for index in which]
    return best


def _too_few(
    flow: Flow, module: nn.Module, places: list[CutPoint], others: list[tuple[ModuleCall, int]], count: int
) -> str:  # fmt: skip
    """Returns the message for a forward with fewer than `count` - 1 places, and what is in the way of more."""
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
    why = ""  # a later reason replaces an earlier one: it bars more places
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
    maker = flow.maker(number)
    return f"a tensor made in '{maker}'" if maker else "a tensor made in the outermost forward"


def _named(
    flow: Flow, module: nn.Module, places: list[CutPoint], others: list[tuple[ModuleCall, int]], named: Sequence[str]
) -> list[CutPoint]:
    """Returns the place at each module that the user named. Raises `InputError`, or `RefusedPlan` with the reason."""
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
            # each reason replaces the one before where it applies, from general to particular
            around = next((path for path in hooked_in_backward(module) if name.startswith(f"{path}.")), "")
            why = why if not around else f"it lies in '{around}', {BACKWARD_HOOK}"
            written = (told_written(flow, module, call) for call in flow.calls() if call.path == name)
            why = next(filter(None, written), why)
            raise RefusedPlan(f"plan: no stage can begin at '{name}': {why}; places: {', '.join(by_path)}")
        chosen.append(by_path[name])
    # by the moments at which they are entered, which also finds a place that is named twice
    if [p.call.enter for p in chosen] != sorted({p.call.enter for p in chosen}):
        raise InputError(f"plan: stages={'|'.join(named)} must name modules in the order in which they run, each once")
    return chosen


def make_stages(flow: Flow, other: Flow, samples: tuple[int, int], places: list[CutPoint]) -> list[Stage]:
    """Returns the stages between the places. Raises `RefusedPlan` where the forward takes different ways.

    other    the same forward on another number of samples
    samples  how many each of the two had
    """
    # calls made as often as there are samples differ with their number, and no stage begins among them (`repeats`)
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
        if stage.exit is None:  # parameters that the model returns as they are (a learned temperature)
            stage.parameters |= {flow.parameters[n] for n in flow.returned if n in flow.parameters}
        written = any(0 <= flow.made[number] < start for number in flow.parameters)
        stage.careful = written or bool(flow.later)  # a forward that failed and ran again would leave things twice
        entry = -math.inf if stage.entry is None else stage.entry.call.enter
        stage.skips = skips_between(-math.inf, entry, flow, other, samples)
        # code behind the exit may change what a later forward reads (`lasting`): the stage then runs that too
        stage.runs_on = stage.exit is not None and stage.exit.runs_on
        if stage.exit is not None and stage.runs_on:
            stage.skips += skips_between(stage.exit.call.enter, math.inf, flow, other, samples)
        for later in flow.later:  # a layer's memory is empty in the first forward, and read from the second on
            _add_used(stage, later)
        stage.entries, stage.exits = _edges(flow, stage, stage.entry), _edges(flow, stage, stage.exit)
        stage.received = [*stage.entries[0].holders] if stage.entries else []
        stage.sent = [*stage.exits[0].holders] if stage.exits else []
        _take_part(flow, stage)
        stages.append(stage)
    return stages


def _add_used(stage: Stage, later: Flow) -> None:
    """Adds to the stage the parameters and buffers that it uses only in a later forward."""
    start, stop = 0, later.end + 1
    # a module that the later forward does not call (a layer dropped by chance) leaves the stage open on that side
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
    """Sets a stage's fields on gradients that the forward takes itself: `taken`, `over`, `answers`, `by`."""
    stage.taken, stage.differentiates = flow.taken, bool(flow.taken or flow.backwards)
    if stage.entry is not None:
        stage.over = frozenset(crossed(flow, stage.entry.call, stage.entry.numbers))
    stage.answers = stage.exit is not None and crossed_at(flow, stage.exit)
    stage.by = found_by(flow, stage.stop, stage.entry, stage.skips, stage.exit)


def _edges(flow: Flow, stage: Stage, boundary: CutPoint | None) -> list[Edge]:
    points = [boundary, *boundary.others] if boundary is not None else []
    return [Edge(point, tuple(_holders(flow, stage, point))) for point in points]


def _holders(flow: Flow, stage: Stage, boundary: CutPoint | None) -> list[Holder]:
    """Returns a holder for each tensor that crosses a stage's boundary; `RefusedPlan` where one has none."""
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
