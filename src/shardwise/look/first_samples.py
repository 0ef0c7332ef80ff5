"""Check before the first step that a task's loss adds up over samples. (scripts/model_look does it for a script.)

This finds what would make a distributed run differ from one process: a loss that is a mean, a contrastive loss, a
module that mixes samples or keeps statistics of its own. The same runs show which modules call batch norm, and which
dim of each random tensor is the batch; with masks that follow these dims the loss must add up too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.errors import RefusedPlan
from shardwise.look.added_up import added_up, against, bar_of, finite, number_apart
from shardwise.look.in_float64 import Again, choices
from shardwise.look.kept_statistics import Values, differing, norms_differ, statistics_differ
from shardwise.look.mixing import MixesSamples, all_here, dealt_draws, modules_that_mix, owners_of
from shardwise.look.one_process import needs_gradients
from shardwise.look.samples import repeated
from shardwise.look.watched_run import Evaluate, Functions, Runner, Seen, TakesGradients, WritesWeights, has_units
from shardwise.parallel.batchnorm import batch_norm_modules
from shardwise.parallel.full import USED_OUTSIDE
from shardwise.part.buffer_ways import ways
from shardwise.part.pairs import attributes_alone
from shardwise.random import EACH_ITS_OWN, BatchDims, Drawn, GlobalRandom, Samples
from shardwise.step.loss import Loss
from shardwise.step.task_metrics import METRICS
from shardwise.trace.all_pairs import AllPairs, told_pairs
from shardwise.trace.without_gradient import HooksLeftOut

T = TypeVar("T")


@dataclass
class Findings:
    """Results of running a module and its loss on a few samples before the first step."""

    batch_norms: list[nn.Module]
    dims: BatchDims
    notices: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)  # parameters that the forward writes into, or whose data it sets
    reentrant: bool = False  # whether reentrant checkpoints run, whose backward is one of its own
    changed: list[str] = field(default_factory=list)  # buffers that the forward changes
    joined: dict[str, str] = field(default_factory=dict)  # changed buffer -> the way in which ranks join it
    read: list[str] = field(default_factory=list)  # buffers that ops of the forward read
    draws: list[str] | None = field(default_factory=list)  # random ops, "op in 'module'"; None: not looked for
    scores: bool = False  # whether attention with dropout runs
    outside: list[str] = field(default_factory=list)  # units of zero=3 whose weights are read while they do not run
    keeps_samples: str = ""  # attribute that keeps something of each sample for the next forward; "" for none
    into_arguments: list[str] = field(default_factory=list)  # units of zero=3 that write into their arguments
    sample_bytes: float = 0.0  # bytes per sample of the largest output of any module
    widest: str = ""  # the path of that module


def look(module: nn.Module, evaluate: Evaluate, whole: Any, parts: tuple[Any, Any] | None,
         sizes: tuple[int, int, int], *, joined: Callable[[Any], Loss] | None, dtype: torch.dtype, strict: bool,
         masks: bool, share: Callable[[list[str]], list[str]] = list, again: Again, staged: bool | None = None,
         follows: bool = False, functions: Functions = (), joins: bool = True,
         mixes: bool = False) -> Findings:  # fmt: skip
    """Returns `Findings` of comparing the loss on `whole` with the losses on two `parts`. `sizes`: samples of each.

    Runs without gradients, unless the forward takes some itself.
    parts    None for a single sample, when nothing is compared
    joined   None for a loss that adds up over samples; else (whole, parts) -> the loss on the parts' joined outputs
    strict   whether the plan splits samples, so that a problem raises `RefusedPlan`; otherwise it is a notice
    masks    whether masks will follow global indices, so that these are tried too
    share    this rank's list -> the lists of all ranks that run a part of the forward, joined: all then branch alike
    again    `Again`: the comparison in float64 in one process. Needed if values are read in Python, by which choices
             may differ by less than rounding in this dtype. Collective, called whether this rank asks or not
    follows  whether other memory that a forward gives a shard (`p.data = x`) is used from then on
    staged   None without pipeline stages; else whether the forward takes gradients itself, since this rank's part may
             fail without them while others' do not
    functions  of the user's that `evaluate` calls beside the module
    joins    whether ranks may join buffers after each forward (step/joined_buffers)
    mixes    whether modules that mix samples may run on all ranks' samples: raises `MixesSamples` for new ones
    Raises `TakesGradients` if units of zero=3 must be merged first, its subclass `WritesWeights` for written shards.
    """

    def attempt() -> Findings:
        plainly = with_attributes_alone(module, evaluate)
        return _Look(
            module,
            plainly,
            whole,
            parts,
            sizes,
            joined,
            dtype,
            strict,
            masks,
            share,
            again,
            follows,
            functions,
            joins,
            mixes,
        ).take()

    return gently(module, attempt, share=share, staged=staged)


def gently(
    module: nn.Module, run: Callable[[], T], *, share: Callable[[list[str]], list[str]] = list,
    staged: bool | None = None,
) -> T:  # fmt: skip
    """Returns `run()`, computed without gradients, or with them if the forward itself takes gradients.

    `share` and `staged` are as in `look`; without stages `staged` is None.
    Raises `TakesGradients` if units of zero=3 free the weights that such gradients go through.
    """
    try:
        if not staged:
            with torch.no_grad(), HooksLeftOut(), _unwarned():
                return run()
    except RuntimeError as error:
        # With stages `staged` tells beforehand, since one stage that tried again alone would leave others waiting.
        if staged is not None or not needs_gradients(error):
            raise
    if has_units(module) if staged is None else share(["units"] if has_units(module) else []):  # on any stage
        raise TakesGradients(
            "the forward takes gradients itself, through units of zero=3 that are freed before its end"
        )
    with torch.enable_grad(), _unwarned():
        return run()


def with_attributes_alone(module: nn.Module, evaluate: Evaluate) -> Evaluate:
    """Returns `evaluate`, wrapped to raise `RefusedPlan` if the forward uses a complex weight not as `module.name`.

    The module holds such a weight as pairs of real numbers, which only its attribute turns into complex ones.
    """
    context = attributes_alone(module)

    def run(batch: Any) -> Loss:
        with context:
            return evaluate(batch)

    return run


@contextmanager
def _unwarned() -> Iterator[None]:
    """Context without warnings, which the task's first step gives once, rather than every run of the look."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@dataclass
class _Look:
    """One attempt at the look; fields as the parameters of `look`. Runs add to `findings` and `problems`."""

    module: nn.Module
    evaluate: Evaluate
    whole: Any
    parts: tuple[Any, Any] | None
    sizes: tuple[int, int, int]
    joined: Callable[[Any], Loss] | None
    dtype: torch.dtype
    strict: bool
    masks: bool
    share: Callable[[list[str]], list[str]]
    again: Again
    follows: bool
    functions: Functions
    may_join: bool
    may_mix: bool

    def __post_init__(self) -> None:
        self.findings, self.problems = Findings([], BatchDims()), list[str]()
        self.drawn: list[Drawn] = []  # random calls of every run
        self.joins: Values = {}  # buffers that ranks join -> their value after a forward on all samples
        self.seen = Seen(self.module)
        self.run = Runner(self.module, self.evaluate, self.seen, self.functions)

    def take(self) -> Findings:
        """Returns the `Findings` of all runs; raises `RefusedPlan` for problems if samples are split (`strict`)."""
        findings, seen = self.findings, self.seen
        with torch.random.fork_rng(devices=[]), seen.watching():
            of_whole, calls, pairs, left = self._run_whole()
            self.problems += self.share(seen.problems())
            if self.parts is None:
                findings.notices.append("a batch of one sample cannot be split: the loss was not checked to add up")
            # after a problem the parts would differ because of it
            elif not self.problems:
                self._compare(of_whole, *self._run_parts(self.parts, calls, pairs, left), self.parts)
            findings.draws = self.share(list(dict.fromkeys(_draw_text(draw.path, draw.op) for draw in self.drawn)))
        if self.strict and self.parts is not None:
            # Collective: called by every rank, though a rank asks only where nothing else differs.
            backwards = [] if seen.reads_values else self.run.own_backwards
            asked = bool(seen.reads_values or backwards) and not self.problems
            every = bool(self.run.own_backwards)
            refused, notices = choices(self.again, seen.repeats(self.sizes), asked, backwards, every=every)
            self.problems += self.share(refused)
            findings.notices += self.share(notices)
        findings.into_arguments = sorted(seen.into_arguments.paths)
        findings.reentrant, (wide, findings.widest) = seen.reentrant, seen.widest
        findings.sample_bytes = wide / max(1, self.sizes[0])
        findings.written, findings.read = sorted(seen.ever_written), sorted(seen.read)
        if self.problems and self.strict:
            raise RefusedPlan("; ".join(self.problems))
        findings.notices += self.problems
        return findings

    def _anywhere(self, here: object) -> bool:
        """Whether `here` is true on any pipeline stage. Collective: stages that took other branches would not meet."""
        return bool(self.share(["here"] if here else []))

    def _run_whole(self) -> tuple[Loss, list[Drawn], AllPairs, Values]:
        """Runs all samples; returns (loss, random calls, watch for all pairs, name -> buffer afterwards)."""
        findings, seen = self.findings, self.seen
        findings.batch_norms = batch_norm_modules(self.module)
        before = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        with AllPairs(self.sizes[0]) as pairs, refusing_writes(seen, self.share, self.follows):
            of_whole, calls, after = self.run(self.whole)
        findings.scores = self._anywhere(seen.attends)
        findings.changed = [name for name, value in before.items() if not torch.equal(value, after[name])]
        self.drawn += calls
        # Code that calls batch norm as a function is no module of that class.
        findings.batch_norms += [norm for norm in seen.batch_norms if norm not in findings.batch_norms]
        return of_whole, calls, pairs, after

    def _run_parts(
        self, parts: tuple[Any, Any], calls: list[Drawn], pairs: AllPairs, left: Values
    ) -> tuple[Loss, Loss, str]:
        """Runs both parts; returns (first loss, second loss, message on all pairs of samples or "").

        Raises `MixesSamples` if modules that mix samples may run on all of them.
        """
        first, _, changed_by_first = self.run(parts[0])
        with AllPairs(self.sizes[2]) as pairs_of_part:
            second, part_calls, changed_by_second = self.run(parts[1])
        self.drawn += part_calls
        self._compare_norms(*self.seen.norm_calls[-3:])  # of the whole and the parts
        self._learn(calls, part_calls)
        if self._anywhere(self.seen.reads_values and (calls or part_calls)):
            for level in (0.02, 0.98):  # low and high random numbers, for both sides of random branches
                calls_at_level = self.run(self.whole, level)[1], self.run(parts[1], level)[1]
                self._learn(*calls_at_level)
                self.drawn += [*calls_at_level[0], *calls_at_level[1]]
        differ = differing(changed_by_first, changed_by_second)
        self._join(differ, left, (changed_by_first, changed_by_second))
        mixed = self.share([name for name in differ if name not in self.findings.joined])
        if mixed and self.may_mix and not self.problems:
            raise MixesSamples(owners_of(mixed), statistics_differ(mixed)[0])
        self.problems += statistics_differ(mixed)
        return first, second, told_pairs(pairs, pairs_of_part)

    def _learn(self, calls: list[Drawn], part_calls: list[Drawn]) -> None:
        """Records which dim counts samples in each random tensor, from the calls for the whole and the second part."""
        n, _, count = self.sizes
        self.findings.dims.learn(dealt_draws(self.module, calls), dealt_draws(self.module, part_calls), n, count)

    def _compare_norms(self, *runs: list[tuple[nn.Module | None, int]]) -> None:
        """Records batch norms over groups of samples, or raises `MixesSamples` for modules around them."""
        problems, norms = norms_differ(*runs)
        paths = {child: path for path, child in self.module.named_modules()}
        around = self.share([paths[norm].rpartition(".")[0] for norm in norms])
        problems = self.share(problems)
        if around and self.may_mix and not self.problems:
            raise MixesSamples(around, problems[0])
        self.problems += problems

    def _join(self, differ: list[str], left: Values, by_parts: tuple[Values, Values]) -> None:
        """Records in which way ranks can join buffers, so that the parts' values give the whole's.

        differ, left, by_parts  names that differ by part; buffers after a forward on the whole, and on each part
        A way must fit from the module's buffers, from those after a first forward, and on equal parts, since what marks
        that a sample came, or keeps the largest, may fit once by chance.
        """
        buffers, (_, *sizes), bar = dict(self.module.named_buffers()), self.sizes, bar_of(self.dtype)
        names = [name for name in differ if name in buffers]
        fits = {name: ways(buffers[name], left[name], [part[name] for part in by_parts], sizes, bar) for name in names}
        fits = {name: fitting for name, fitting in fits.items() if fitting}
        # collective, so asked even where this rank has none; with one part there is nothing to join
        if not self.may_join or not self._anywhere(fits) or self.parts is None:
            return
        # a second time from what the first forward left: a counter or a maximum may agree only from a fresh buffer
        start = {name: left[name] for name in fits}
        whole, *again = [self.run(batch, start=start)[2] for batch in (self.whole, *self.parts)]
        # once more with two equal parts: where samples differ, marks of who came would add up by chance
        twice, equal = self.run(repeated(self.parts[0], [2] * sizes[0]))[2], [sizes[0]] * 2
        for name, fitting in fits.items():
            later = ways(start[name], whole[name], [part[name] for part in again], sizes, bar)
            alike = ways(buffers[name], twice[name], [by_parts[0][name]] * 2, equal, bar)
            if way := next((way for way in fitting if way in later and way in alike), ""):
                self.findings.joined[name], self.joins[name] = way, left[name]

    def _compare(self, of_whole: Loss, first: Loss, second: Loss, all_pairs: str, parts: tuple[Any, Any]) -> None:
        """Compares the whole's loss with its parts', then second forwards and masks if there is no problem."""
        findings, seen, sizes, dtype = self.findings, self.seen, self.sizes, self.dtype
        if self.share([] if finite(of_whole, first, second) else ["not finite"]):
            findings.notices.append("the loss on the first samples is not finite: not checked to add up")
            return
        if self.joined is None:  # otherwise the loss is declared not to add up over samples
            differs = self.share(_sums_differ(of_whole, first, second, sizes, dtype, all_pairs))
            if differs and self.may_mix and not self.problems:
                paths = self.share(modules_that_mix(self.module, self.run, self.whole, parts))
                if paths:
                    raise MixesSamples(paths, differs[0])
            self.problems += differs
        elif self.strict:  # compared is the loss on the parts' outputs put together
            joined = Runner(self.module, self.joined, seen, self.functions)((self.whole, parts))[0]
            self.problems += self.share(_joined_differs(of_whole, joined, dtype))
        if not self.strict or self.joined is not None:  # nothing is split, or parts have no losses to compare again
            return
        if not self.problems and (left := self.share(seen.left)):
            # Shapes that follow the number of samples show that it is kept for each sample.
            per_sample = seen.kept_shapes[0] != seen.kept_shapes[-1]
            differs, read = _left_differs(self.run, left, of_whole, self.whole, parts, sizes, dtype, self.joins)
            self.problems += self.share(differs)
            findings.keeps_samples = "".join(self.share(left[:1] if per_sample and read else [])[:1])
        if self.masks and self._anywhere(findings.dims.dims_by_op) and not self.problems:
            self.problems += _masks_differ(self.run, findings.dims, self.whole, parts, sizes, dtype)


@contextmanager
def refusing_writes(seen: Seen, share: Callable[[list[str]], list[str]], follows: bool) -> Iterator[None]:
    """Context that raises `WritesWeights` if the forward inside wrote into weights of which ranks hold shards.

    Parameters as in `look`.
    """

    def lost() -> list[str]:
        return sorted((seen.ever_written - seen.given_to_pieces if follows else seen.ever_written) & seen.in_pieces)

    try:
        yield
    except RuntimeError as error:  # a write of an unsharded value into a shard
        if names := lost():
            raise WritesWeights(names) from error
        raise
    if isinstance(seen.module, FSDPModule) and (names := share(lost())):  # collective, under zero=3 on all ranks
        raise WritesWeights(names)


def _draw_text(path: str, op: str) -> str:
    """Returns a random op ("aten.bernoulli_.float") and its module as text: "bernoulli_ in 'path'"."""
    return op.split(".")[1] + (f" in '{path}'" if path else "")


def _sums_differ(whole: Loss, first: Loss, second: Loss, sizes: tuple[int, int, int], dtype: torch.dtype,
                 pairs: str) -> list[str]:  # fmt: skip
    """Returns [a problem] if the parts' losses do not add up to the whole's, with a remedy; else []."""
    apart = number_apart(whole, first, second, dtype)
    if apart is None:
        return []
    (name, value, parts), (n, a, b) = apart, sizes
    sums = f"on {n} samples and on {a} and {b} of them is {against(value, parts)} in parts"
    if problem := _of_a_metric(name, sums):
        return [problem]
    sums = f"its {name} {sums}"
    if name.startswith("weight"):
        return [f"the loss does not add up over samples: {sums}. The weight must be counted from the samples at hand"]
    if pairs:
        return [f"the loss does not add up over samples: {sums}; {pairs}"]
    return [
        f"the loss does not add up over samples: {sums}. Return (sum, weight), not a mean; a loss over pairs of "
        'samples (contrastive) declares loss_scope="global"; a module that mixes samples other than by batch norm '
        'declares loss_scope="model", by which every rank runs it on all of them; a branch or a draw of numpy\'s or '
        "Python's that depends on which samples are together is made for each sample"
    ]


def _of_a_metric(name: str, sums: str) -> str:
    """Returns the problem if `name` is a number of Task.metrics; "" for one of the loss. `sums`: what differs."""
    what, _, rest = name.partition(METRICS)
    if not rest:
        return ""
    number = "weight" if what.startswith("weight") else "sum"
    return (
        f"the metric '{rest} of Task.metrics does not add up over samples: its {number} {sums}. Return (sum, weight) "
        "of the samples at hand: no mean, and nothing kept from earlier calls, since each rank sees its own samples"
    )


def _left_differs(run: Runner, left: list[str], of_first: Loss, whole: Any, parts: tuple[Any, Any],
                  sizes: tuple[int, ...], dtype: torch.dtype, joins: Values) -> tuple[list[str], bool]:  # fmt: skip
    """Returns (problems of a second forward, which finds what a first one `left`; whether it reads that).

    joins  name -> value after a forward on all samples, for buffers that ranks join
    """
    of_whole, first, second = (run.second(batch, joins) for batch in (whole, *parts))
    apart = number_apart(of_whole, first, second, dtype) if finite(of_whole, first, second) else None
    # Bit by bit: the same samples give another loss only if the second forward reads what the first one left.
    read = of_whole.numbers() != of_first.numbers()
    if apart is None:
        return [], read
    (name, value, added), (n, a, b) = apart, sizes
    what = f"'{left[0]}'{f' and {len(left) - 1} more' if len(left) > 1 else ''}"
    return [
        f"the forward leaves {what} for the next one, computed "
        f"of all samples of a batch together, and a second forward reads it: there the loss's {name} on {n} samples "
        f"and on {a} and {b} of them is {against(value, added)} in parts, so ranks would each keep one of "
        'their own samples: loss_scope="model" (of Task, of prepare) has every rank run the model on all of them'
    ], read


def _joined_differs(whole: Loss, joined: Loss, dtype: torch.dtype) -> list[str]:
    """Returns [a sentence] on the first number that differs between the whole's loss and joined parts'; else []."""
    for name, value in whole.numbers().items():
        other = joined.numbers().get(name, 0.0)
        if not added_up(name, whole, other, dtype):
            problem = _of_a_metric(name, f"on a few samples is {against(value, other)} on parts of them, added up")
            return [
                problem
                or f'with loss_scope="global" the loss\'s {name} on a few samples is {value:.6g}, but '
                f"{other:.6g} on the model's outputs for parts of them put together: return "
                "what belongs to each sample (embeddings), and compute what compares samples (logits) in the loss"
            ]
    return []


def _masks_differ(run: Runner, dims: BatchDims, whole: Any, parts: tuple[Any, Any], sizes: tuple[int, int, int],
                  dtype: torch.dtype) -> list[str]:  # fmt: skip
    """Returns [a problem] if no order of samples in random tensors makes the parts' masks the whole's; else []."""
    n, a, b = sizes
    apart: list[tuple[str, float, float]] = []
    for order in dims.orders(n):
        dims.blocks = order
        random = GlobalRandom(dims, all_here=partial(all_here, run.module))
        together = run.masked(whole, random, Samples(0, n, n))
        first = run.masked(parts[0], random, Samples(0, a, n))
        second = run.masked(parts[1], random, Samples(a, b, n))
        differs = number_apart(together, first, second, dtype, least=1e-6)  # draws may be float32 in a float64 run
        if differs is None:
            return []
        apart.append(differs)
    dims.blocks, (name, value, added) = frozenset(), apart[0]
    return [
        f"masks dealt by global index do not give one process's: with them the loss's {name} on {n} samples is "
        f"{against(value, added)} in parts. A random tensor holds the samples in an order that cannot "
        "be followed (neither one by one nor all of them several times), or a generator of the module's own draws it; "
        f"draw tensors with a batch dim, or {EACH_ITS_OWN}"
    ]


def explained(error: Exception) -> RefusedPlan | None:
    """Returns the `RefusedPlan` that explains an error which only zero=3 causes; None for other errors."""
    if "mixed torch.Tensor and DTensor" in str(error):
        return RefusedPlan(USED_OUTSIDE)
    return None
