"""The table of rules that refuse a plan, with reasons. Refusals that depend on the module: engine/, parallel/.

A rule names the fields it looks at, says when it applies, and gives the reason in one sentence. `kind` is "not built"
for a combination without code, "illegal" for one that cannot be right. Keys without what they act on: `Need`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwise.errors import RefusedPlan
from shardwise.layout.keys import NEEDS, Need, keys_with
from shardwise.layout.offload import Placement, placements, weights_on_host
from shardwise.layout.plan import Plan
from shardwise.layout.schedule_kinds import KINDS, listed
from shardwise.layout.zero_stages import STAGES


@dataclass(frozen=True)
class Rule:
    """One rule: a plan for which `when(plan)` is True is refused for `reason`."""

    combination: str  # the keys and values that it refuses, for the user
    kind: str  # "not built" | "illegal"
    reason: str
    when: Callable[[Plan], bool]


def _no_schedule(plan: Plan) -> bool:
    """Whether the plan's schedule cannot be made for its pp, microbatches and stages_per_rank."""
    # stages that pp does not divide have a rule of their own
    if plan.pp == 1 or (plan.stages and (len(plan.stages) + 1) % plan.pp):
        return False
    return KINDS[plan.schedule].misfit(plan.pp, plan.microbatches, plan.stages_per_rank) is not None


def _of_need(need: Need) -> Rule:
    """Returns the rule that refuses a plan which sets one of the keys that have `need`, but lacks it."""
    keys = [name for name, needs in keys_with(Plan, "needs").items() if needs is need]
    named = f"{', '.join(keys[:-1])} or {keys[-1]}" if keys[1:] else keys[0]
    plain = Plan()
    return Rule(
        f"{named} with {need.without}", "illegal", need.reason,
        lambda p: not need.met(p) and any(getattr(p, key) != getattr(plain, key) for key in keys),
    )  # fmt: skip


RULES: tuple[Rule, ...] = (
    *map(_of_need, NEEDS),
    Rule(
        "domain with ep > 1",
        "not built",
        "experts are given the rows of a rank, which is one run of positions and no tile",
        lambda p: p.tiles > 1 and p.ep > 1,
    ),
    Rule(
        "position_chunks with compile",
        "not built",
        "a compiled block is one program, in which no product waits for the operations behind it",
        lambda p: p.position_chunks > 1 and p.compile,
    ),
    Rule(
        "position_chunks with domain",
        "not built",
        "halos are fetched by functions that need values at once, and a wide tensor has none yet",
        lambda p: p.position_chunks > 1 and p.tiles > 1,
    ),
    Rule(
        "position_chunks with pp",
        "not built",
        "a stage may end between a product that widens and the one that narrows, and what waits there has no values "
        "to send: use remat=full",
        lambda p: p.position_chunks > 1 and p.pp > 1,
    ),
    Rule(
        "domain with cp or cp_ulysses",
        "not built",
        "which dims are a sequence is found on whole samples, and which are space too: one of them is cut",
        lambda p: p.tiles > 1 and p.cp * p.cp_ulysses > 1,
    ),
    Rule(
        "domain with sp",
        "not built",
        "sp cuts the middle dim of (B, S, H) between cut weights, where tiles are cut along dims of their own: leave "
        "sp out, tp is exact without it",
        lambda p: p.tiles > 1 and p.sp,
    ),
    Rule(
        "deterministic with tp, pp, cp, cp_ulysses, domain or ep",
        "not built",
        "sums over these axes are taken inside a piece of the batch, in an order that depends on their degrees: spread "
        "data alone, by dp_replicate or dp_shard",
        lambda p: p.deterministic > 0 and p.tp * p.pp * p.cut_positions * p.ep > 1,
    ),
    Rule(
        "deterministic with dp_replicate > 1 and dp_shard > 1",
        "not built",
        "the tree of sums is over one axis: use dp_shard alone, or dp_replicate alone",
        lambda p: p.deterministic > 0 and p.dp_replicate > 1 and p.dp_shard > 1,
    ),
    Rule(
        "deterministic with compile, fp16 or bf16-full",
        "not built",
        "fp16 chooses its loss scale by sums over ranks, elements of bf16-full round by their place in a piece, and "
        "compiled blocks were not compared: use fp32, fp64 or bf16 without compile",
        lambda p: p.deterministic > 0 and (p.compile or p.precision in ("fp16", "bf16-full")),
    ),
    Rule(
        "deterministic that accumulate x data ranks does not divide",
        "illegal",
        "every rank computes as many pieces in each micro-batch: give another number of pieces",
        lambda p: p.deterministic > 0 and p.deterministic % (p.accumulate * p.data_ranks) != 0,
    ),
    Rule(
        "offload of gradients without parameters on the host",
        "illegal",
        "gradients lie where the weights do that the optimizer updates: offload=parameters under zero=3 puts weights, "
        "gradients and the optimizer's state on the host",
        lambda p: any(part != Placement("gradients") for part in placements(p.offload, "gradients"))
        or (bool(placements(p.offload, "gradients")) and not weights_on_host(p.offload)),
    ),
    Rule(
        "offload of a fraction of parameters to the host",
        "not built",
        "the optimizer would update weights on the host and on the device: use offload=parameters, or "
        "offload=optimizer, which may be a fraction",
        lambda p: weights_on_host(p.offload) and Placement("parameters") not in placements(p.offload, "parameters"),
    ),
    Rule(
        "offload of parameters without zero=3",
        "illegal",
        "weights that modules hold whole are read at any time; units of zero=3 gather theirs for each use: add zero=3",
        lambda p: bool(placements(p.offload, "parameters")) and not p.sharded.weights,
    ),
    Rule(
        "offload of parameters with ep > 1",
        "not built",
        "experts are held by their ranks and not gathered, so that their weights, most of the model, would stay: use "
        "offload=optimizer",
        lambda p: bool(placements(p.offload, "parameters")) and p.ep > 1,
    ),
    Rule(
        "offload of activations with remat = selective",
        "not built",
        "results that selective recompute keeps are held apart from what autograd keeps, and would not move: use "
        "remat=full, under which blocks' inputs move, or none",
        lambda p: bool(placements(p.offload, "activations")) and p.remat == "selective",
    ),
    Rule(
        "optimizer_state with precision = fp64, or bf16 with precision = bf16-full",
        "illegal",
        "float64 is for exact runs, and under bf16-full the state is in bf16 already: leave optimizer_state out",
        lambda p: p.optimizer_state != "full" and (
            p.precision == "fp64" or (p.precision == "bf16-full" and p.optimizer_state == "bf16")
        ),
    ),
    Rule(
        "optimizer_state = 8bit with deterministic and zero",
        "illegal",
        "blocks of 8 bits begin where a rank's piece does, so that other ranks would give other bits: use "
        "optimizer_state=bf16, or zero=0",
        lambda p: p.optimizer_state == "8bit" and p.deterministic > 0 and p.sharded.state,
    ),
    Rule(
        "masters = split without precision = bf16",
        "illegal",
        "the upper half of a float32 master is its weight in bf16, which other precisions do not have: give "
        "precision=bf16",
        lambda p: p.masters == "split" and p.precision != "bf16",
    ),
    Rule(
        "masters = split with zero = 3",
        "illegal",
        "shards are the masters, and weights in bf16 are there while they are gathered alone, so that nothing is held "
        "twice: leave masters out",
        lambda p: p.masters == "split" and p.sharded.weights,
    ),
    Rule(
        "gradients = as_made with accumulate > 1 or pp > 1",
        "illegal",
        "gradients of the earlier micro-batches are held until the last one's are added, so that nothing is gained: "
        "leave gradients out",
        lambda p: p.gradients == "as_made" and p.step_microbatches > 1,
    ),
    Rule(
        "gradients = as_made with precision = fp16 or deterministic",
        "illegal",
        "whether fp16's loss scale overflowed, and sums over the pieces of a batch, are known once all gradients are: "
        "leave gradients out",
        lambda p: p.gradients == "as_made" and (p.precision == "fp16" or p.deterministic > 0),
    ),
    Rule(
        "gradients = as_made with ep > 1, or offload of parameters",
        "not built",
        "experts' gradients are summed apart from the others', and weights that lie elsewhere are gathered while "
        "others would be updated: leave gradients out",
        lambda p: p.gradients == "as_made" and (p.ep > 1 or p.moves_weights),
    ),
    Rule(
        "compile with tp > 1, cp, cp_ulysses or domain, and remat = selective",
        "not built",
        "which results a block keeps is chosen while it is written down, and the compiled one runs again as a whole: "
        "use remat=full or none",
        lambda p: p.compile and (p.tp > 1 or p.cut_positions > 1) and p.remat == "selective",
    ),
    Rule(
        "compile with tp > 1, cp or cp_ulysses, and ep > 1",
        "not built",
        "a block is written down as one program with its backward, and the sizes of an exchange of tokens are known "
        "in each step alone",
        lambda p: p.compile and (p.tp > 1 or p.cut_positions > 1) and p.ep > 1,
    ),
    Rule(
        "ep that does not divide dp_shard * cp * cp_ulysses",
        "illegal",
        "ranks of ep exchange the tokens that each has of its own: give dp_shard a multiple of ep, or cp and "
        "cp_ulysses with it (tp cuts each expert, so tp=2 with half of ep has as much on a rank)",
        lambda p: p.dp_shard * p.cut_positions % p.ep != 0,
    ),
    Rule(
        "domain_depth with domain_overlap = always",
        "illegal",
        "a halo that several convolutions read is waited for by the first of them: give one of the two",
        lambda p: p.domain_depth > 1 and p.domain_overlap == "always",
    ),
    Rule(
        "domain_depth with compile",
        "not built",
        "which operations treat each element alone is asked of each as it runs, and a compiled block is one program",
        lambda p: p.domain_depth > 1 and p.compile,
    ),
    Rule(
        "stages that pp does not divide",
        "illegal",
        "every rank of the pipeline runs as many stages: stages names all but the first",
        lambda p: p.pp > 1 and bool(p.stages) and (len(p.stages) + 1) % p.pp != 0,
    ),
    Rule(
        "schedule does not fit pp, microbatches, stages or stages_per_rank",
        "illegal",
        "no order of its forwards and backwards exists for these numbers; shardwise show schedule says why",
        _no_schedule,
    ),
    Rule(
        "remat with a schedule that splits backwards",
        "illegal",
        f"{listed(lambda kind: kind.split)} run a backward in two parts, and a recomputed block would run "
        "again for each weight in the second: use 1f1b or interleaved1f1b",
        lambda p: p.pp > 1 and p.remat != "none" and KINDS[p.schedule].split,
    ),
    Rule(
        "compile with a schedule that splits backwards",
        "illegal",
        "a compiled block's backward is one program, which would run for the input's gradient and once more for the "
        "weights': use 1f1b or interleaved1f1b",
        lambda p: p.pp > 1 and p.compile and KINDS[p.schedule].split,
    ),
    Rule(
        "zero = 3 with a schedule that splits backwards",
        "illegal",
        "fully_shard frees a block's weights and reduces its gradients once, after the first part of the backward, "
        "before the second has made them: use zero=2, or 1f1b or interleaved1f1b",
        lambda p: p.pp > 1 and p.sharded.weights and KINDS[p.schedule].split,
    ),
    Rule(
        "zero >= 1 with dp_shard = 1",
        "illegal",
        "zero shards over the dp_shard axis (and those of a sequence or of tiles), which has one rank: give dp_shard "
        "its degree",
        lambda p: STAGES[p.zero].state and not p.sharded.state,
    ),
    Rule(
        "reduce_dtype narrower than fp64 with precision = fp64",
        "illegal",
        "float64 gradients would be rounded on the wire: leave reduce_dtype at auto",
        lambda p: p.precision == "fp64" and p.reduce_dtype not in ("auto", "fp64"),
    ),
    Rule(
        "reduce_dtype = fp16 without precision = fp16",
        "illegal",
        "sums of gradients overflow in fp16 without a loss scaler",
        lambda p: p.reduce_dtype == "fp16" and p.precision != "fp16",
    ),
)  # fmt: skip


def applying(plan: Plan) -> list[Rule]:
    """Returns the rules that refuse a plan; [] for a plan that runs."""
    return [rule for rule in RULES if rule.when(plan)]


def check(plan: Plan, kinds: tuple[str, ...] = ("not built", "illegal")) -> None:
    """Raises `RefusedPlan`, with every reason, if a rule of these kinds refuses the plan."""
    reasons = [f"{rule.combination}: {rule.reason}" for rule in applying(plan) if rule.kind in kinds]
    if reasons:
        raise RefusedPlan(f"plan {plan} is refused: " + "; ".join(reasons))


def as_markdown() -> str:
    """Returns the table as Markdown, for the documentation."""
    rows = "\n".join(f"| {r.combination} | {r.kind} | {r.reason} |" for r in RULES)
    return f"| combination | kind | reason |\n|---|---|---|\n{rows}\n"
