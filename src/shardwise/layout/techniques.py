"""Texts on each technique for docs/techniques/table.md; those of ZeRO come from zero_stages."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.layout.zero_stages import SHARDED


@dataclass(frozen=True)
class Technique:
    """One technique, texts for the table; P in them is the bytes of the parameters."""

    name: str
    page: str  # its page in docs/techniques
    plan: str  # an example over eight ranks
    split: str  # what is divided over ranks, or over time
    sent: str  # messages in a step, and their bytes
    needs: str  # what a task must have for it
    when: str  # when to choose it


TECHNIQUES = (
    Technique(
        "replicas", "replicas", "dp_replicate=8", "samples",
        "gradients, all-reduce of P, during the last backward of a step", "model, gradients and state fit on a rank",
        "it fits, and is only slow",
    ),
    *(
        Technique(
            stage.name, f"zero{stage.number}", f"dp_shard=8,zero={stage.number}", stage.split, stage.sent, stage.needs,
            stage.when,
        )
        for stage in SHARDED
    ),
    Technique(
        "hybrid sharding", "hybrid", "dp_replicate=2,dp_shard=4,zero=3",
        "as ZeRO-3 inside a group; samples over groups",
        "as ZeRO-3 inside the group; pieces of gradients, all-reduce between groups", "as ZeRO-3",
        "the model fits on one node's ranks, and links between nodes are slower",
    ),
    Technique(
        "tensor parallelism", "tensor", "tp=8", "weights by heads, width and words; activations between them",
        "activations, all-reduce twice in each block's forward and backward", "products (derived); ranks that are near",
        "a layer, or its activations, are too large for a rank; inside a node",
    ),
    Technique(
        "sequence parallelism", "tensor", "tp=8,sp=true", "as tensor parallelism; also what lies between, by positions",
        "an all-gather and a reduce-scatter in the place of each all-reduce", "as tensor parallelism, and positions",
        "with tp, always but for very short sequences",
    ),
    Technique(
        "ring attention", "sequence", "cp=8", "the sequence",
        "keys and values, from rank to rank around the ring, beside attention", "attention that can be met; positions",
        "sequences whose activations do not fit",
    ),
    Technique(
        "Ulysses", "sequence", "cp_ulysses=8", "the sequence; heads inside attention",
        "queries, keys, values and outputs, all-to-all around each attention", "as many heads as ranks",
        "as ring attention, with heads enough and a fast link",
    ),
    Technique(
        "tiles of a field", "domain", "domain=2x4", "space",
        "halos, from neighbours, before each operation that reads them; beside large convolutions",
        "operations on space with rules (convolutions, pooling, norms ...)", "images or fields too large for a rank",
    ),
    Technique(
        "pipeline", "pipeline", "pp=8,microbatches=16", "the module into stages; micro-batches in time",
        "activations of a stage's border, and their gradients, for each micro-batch",
        "places to cut the forward (found)",
        "links are slow, and the batch gives several micro-batches for each stage",
    ),
    Technique(
        "experts", "expert", "dp_shard=8,zero=1,ep=8", "routed experts over ranks of dp_shard and cp",
        "tokens, all-to-all to their experts and back, in each routed layer", "routed experts (found by trial)",
        "experts are most of the model",
    ),
    Technique(
        "recompute", "recompute", "dp_replicate=8,remat=full", "nothing: activations are made again in backward",
        "nothing (with tp, the sums inside the block again)", "blocks that give the same when run again",
        "activations do not fit, before smaller micro-batches",
    ),
    Technique(
        "offload of the optimizer", "offload", "dp_shard=8,zero=1,offload=optimizer:disk",
        "nothing: the optimizer's state lies on a disk or the host between steps",
        "between ranks nothing; state to the update and back, once a step",
        "an optimizer that treats tensors one by one",
        "the state does not fit, and there are no more ranks to shard it over",
    ),
    Technique(
        "gradients used as made", "offload", "dp_shard=8,zero=1,gradients=as_made",
        "nothing: weights are updated within backward, each gradient freed as it is used",
        "one row more between ranks, before backward", "an optimizer that treats tensors one by one; no clipping",
        "gradients do not fit, a step has one micro-batch, and nothing is clipped",
    ),
    Technique(
        "state in fewer bytes", "lean", "dp_shard=8,zero=1,precision=bf16,optimizer_state=8bit,masters=split",
        "nothing: the optimizer's state rests in 8 bits or bf16, masters as the half that bf16 weights lack",
        "nothing", "an optimizer that treats tensors one by one; for split masters precision=bf16 and zero=0 to 2",
        "the state does not fit; split masters always, they are exact",
    ),
    Technique(
        "offload of weights", "offload", "dp_shard=8,zero=3,offload=parameters",
        "nothing: shards of weights, gradients and state lie on the host; weights and state on a disk, for CPUs",
        "between ranks as ZeRO-3; weights from the host for each gather, gradients to it; the host updates",
        "repeated blocks (found, or wrap=); on a disk an optimizer that treats tensors one by one",
        "weights and state do not fit, and there are no more ranks; one rank alone too",
    ),
    Technique(
        "offload of activations", "offload", "dp_shard=8,zero=3,offload=activations:disk",
        "nothing: what blocks keep for backward lies on a disk or the host until then",
        "between ranks nothing; activations there and back, beside the blocks before and behind",
        "repeated blocks (found, or named by wrap=)",
        "activations do not fit, and a disk or link is faster than to compute them again",
    ),
    Technique(
        "chunks of positions", "chunks", "cp=8,position_chunks=8", "wide tensors of a rank's own positions, in time",
        "nothing (with tp, sums in pieces)", "products that widen, and operations that keep positions apart (tried)",
        "feed-forward networks and logits of long sequences do not fit",
    ),
    Technique(
        "accumulation", "accumulation", "dp_replicate=8,accumulate=8", "a rank's samples, in time",
        "nothing (ZeRO-2 and 3: once more for each micro-batch)", "a batch of several samples for each rank",
        "activations do not fit, or the batch shall be larger",
    ),
)  # fmt: skip
