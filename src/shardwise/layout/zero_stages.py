"""`STAGES`: the facts of each stage of ZeRO, read by plans, rules, engine, rehearsals, forecasts and docs.

A shard group is the ranks of dp_shard times those that cut positions. Between micro-batches each of its ranks keeps:

    zero   optimizer state, masters   gradients   weights   collectives of a step with m micro-batches
    0      whole                      whole       whole     all-reduce of gradients
    1      shard                      whole       whole     reduce-scatter of gradients; all-gather of weights
    2      shard                      shard       whole     m reduce-scatters; all-gather of weights
    3      shard                      shard       shard     m reduce-scatters and 2m all-gathers of each unit

A new variant is an entry at the end of this file and code that runs it: `parallel/flat` (1, 2), `parallel/full` (3).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ZeroStage:
    """A stage of ZeRO: what a rank of a shard group keeps as a shard, and texts on it for the docs.

    number      its number in plans (`zero=`)
    name        its name in forecasts and docs
    adds        what it shards beyond the stage before it, a text
    state       Whether optimizer state and master weights are sharded, as pieces or by owners of whole tensors
    gradients   Whether gradients are sharded too, so that they are reduced after every micro-batch
    weights     Whether weights are sharded too, by units
    gathers     all-gathers of a unit's weights in each micro-batch: 2 if it is freed after its forward and gathered
                again for its backward, 1 if it is kept until its backward is over, 0 if weights are not sharded
    searched    Whether a search tries it beside cuts of the module by default; the others save less, or cost more
    split, sent, needs, when   as of `techniques.Technique`
    """

    number: int
    name: str
    adds: str
    state: bool = False
    gradients: bool = False
    weights: bool = False
    gathers: int = 0
    searched: bool = True
    split: str = ""
    sent: str = ""
    needs: str = ""
    when: str = ""

    @property
    def flat(self) -> bool:
        """Whether shards are flat pieces of buckets, while the module's weights stay whole."""
        return self.state and not self.weights

    def reductions(self, micro_batches: int) -> int:
        """Returns the number of times that gradients are reduced in a step of so many micro-batches."""
        return micro_batches if self.gradients else 1


STAGES = {
    stage.number: stage
    for stage in (
        ZeroStage(0, "DDP", "nothing"),
        ZeroStage(
            1, "ZeRO-1", "optimizer state", state=True,
            split="samples; optimizer state",
            sent="gradients, reduce-scatter of P, once a step; weights, all-gather of P, after the update",
            needs="an optimizer that bears pieces, or whole tensors (tried)",
            when="optimizer state does not fit, or to accumulate long",
        ),
        ZeroStage(
            2, "ZeRO-2", "and gradients", state=True, gradients=True, searched=False,
            split="samples; state and gradients",
            sent="as ZeRO-1, with a reduce-scatter for each micro-batch",
            needs="as ZeRO-1",
            when="gradients do not fit either",
        ),
        ZeroStage(
            3, "ZeRO-3", "and parameters", state=True, gradients=True, weights=True, gathers=2,
            split="samples; state, gradients and weights",
            sent="weights, all-gather of each block before its forward and its backward; gradients, reduce-scatter "
            "after it",
            needs="repeated blocks (found, or wrap=)",
            when="weights do not fit; a link as fast as inside a node",
        ),
    )
}  # fmt: skip
UNSHARDED = STAGES[0]
DEFAULT = 3  # of a plan with dp_shard that names no stage, as FSDP2 has it
SHARDED = [stage for stage in STAGES.values() if stage.state]
PER_MICROBATCH = STAGES[2]  # what is kept whole beside units of zero=3 (experts, written weights) lies in its pieces


def default_stage(ranks: int, *, moved: bool = False) -> int:
    """Returns the number of the stage of a plan that names none.

    ranks  degree of dp_shard;  moved  whether weights lie on the host or a disk (`Plan.moves_weights`)
    """
    return DEFAULT if ranks > 1 or moved else UNSHARDED.number
