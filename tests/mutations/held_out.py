"""Bugs planted on both sides that were drawn before anybody saw whether a proof finds them.

python tests/mutations/held_out.py [WORD ...] [--thorough]     plant them, tell which are caught, and the share

Functions were drawn by a seed from every room (another one of the room where the drawn one decides no number), and
each edit was written down before the first of them ran. Left out since: edits that change nothing which any task meets.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("", "tasks", "kit")]

from mutations.both import BF16, FP16, MICRO, NARROW, RUN, TWO, main  # noqa: E402
from mutations.bugs import HERE, M, bug  # noqa: E402

T = "mutations.held_out_tasks:"
LORA, SCALED, WSD, BLEND, EXPERTS = (f"mutations/{name}.toml" for name in ("lora", "scaled", "wsd", "blend", "experts"))
SHARDED = "dp_shard=2,zero=3"

STEP = [
    bug("what has no batch dim counts its gradient on each rank", "step.forward:Forward._gathered",
        "_ShareOfGradient.apply(leaf, ranks) if leaf.requires_grad else leaf", "leaf", "module_tasks:pairs", TWO),
    bug("the norm is that of the first shard", "step.normalise:normalise",
        "agreed.square_norms[: state.mesh.shard.size] if summed", "agreed.square_norms[:1] if summed", M + "mlp",
        "dp_shard=2,zero=2", clip_norm=0.1),
    bug("good steps are counted on over an overflow", "step.scaler:LossScale.update",
        "0 if overflow else self._good_steps + 1", "self._good_steps + 1", NARROW, FP16),
    bug("a metric's last micro-batch alone is kept", "step.task_metrics:MetricTally.add",
        "(before[0] + total, before[1] + weight)", "(total, weight)", RUN, MICRO),
]  # fmt: skip

LAYOUT = [
    bug("a rank's place is one in the batch, not in the micro-batch", "layout.dealing:deal",
        "low + stop, start,", "low + stop, low + start,", M + "decoder_dropout", MICRO),
    bug("parameters in a bucket begin too early", "layout.flat_buckets:lay_out",
        "-(-filled // align) * align", "filled // align * align", HERE + "gated", "dp_shard=2,zero=1"),
]  # fmt: skip

DATA = [
    bug("the last batch of a pass is left out", "data.steps:Steps.walk", "stop <= end", "stop < end", RUN, TWO),
    bug("the smallest remainders are rounded up", "data.blend:shares", "np.argsort(-(exact - np.floor(exact))",
        "np.argsort((exact - np.floor(exact))", f"{BLEND} task.name={T}thirds", TWO),
    bug("the sources of a blend have one seed", "data.blend:BlendOrder._samples",
        "hash_of(self.seed, self.names[index])", "self.seed", BLEND, TWO),
    bug("held-out windows are the first ones", "data.tokens:TokenSource.read", "self.span[0] + index", "index",
        "mutations/tokens.toml", TWO),
    bug("a short batch is no step of an epoch", "data.loader:Loader.steps_per_epoch",
        "whole + (1 if rest and not self._steps.drop_last else 0)", "whole", SCALED, TWO),
]  # fmt: skip

TRAINING = [
    bug("the schedule ends with this proof's steps", "training.rank_parts:engine_of", "job.scheduled or job.steps",
        "job.steps", RUN, TWO),
    bug("held-out samples are the last of their stretches", "training.held_out:Spread.read",
        "self._length, index)[0]", "self._length, index)[1] - 1", RUN, TWO),
    bug("the decay of wsd is a step short", "training.learning_rates:wsd", "decay + 1)", "decay)", WSD, TWO),
    bug("evaluations come a step late", "training.loop:_Rank._evaluates_after", "(step + 1) % every == 0",
        "step % every == 0", RUN, TWO),
]  # fmt: skip

CHECKPOINT = [
    bug("a frozen weight's shard is labelled as its first one", "checkpoint.holdings:_frozen_piece",
        "list(offset)[: len(whole)]", "[0] * len(whole)", LORA, SHARDED),
    bug("a box ends where all indices do", "checkpoint.pieces:narrowed", "min(last - at, stop - start)",
        "min(last, stop - start)", f"{EXPERTS} task.name={M}gpt2", "tp=2,dp_shard=2,zero=3"),
    bug("the end of a part of a row is left out", "checkpoint.pieces:_interval", "first - (top - 1) * row, row, base",
        "first - (top - 1) * row, row - 1, base", f"{EXPERTS} task.name={M}gpt2", "tp=2,dp_shard=2,zero=1"),
    bug("averages are written under the weights before them", "checkpoint.holdings:averages",
        "pieces[name][0], average", "pieces[name][0], pieces[name][1]", RUN, TWO),
]  # fmt: skip

PRECISION = [
    bug("outputs stay narrow before the loss", "precision:Precision.cast_outputs",
        "torch.promote_types(self.compute, torch.float32)", "self.compute", M + "mlp", BF16),
    bug("buffers are as narrow as weights", "precision:Precision.buffers",
        "torch.float64 if self.compute == torch.float64 else torch.float32", "self.compute", M + "unet_batchnorm",
        BF16),
]  # fmt: skip

RANDOM = [
    bug("rows of elements begin at another dim's multiples", "random.modes:_rows_and_columns",
        ".flatten() * sizes[-1]", ".flatten() * sizes[0]", M + "decoder_dropout", TWO),
    bug("an element's index is counted in this rank's share", "random.modes:_linear_index", "stride *= sizes[dim]",
        "stride *= len(places[dim])", "module_tasks:time_first", TWO),
    bug("normal numbers are too wide", "random.variates:normal", "torch.sqrt(-2 *", "torch.sqrt(-2.2 *",
        "unusual_forwards:variational", TWO),
]  # fmt: skip

PART = [
    bug("what is fetched begins at a share's first index", "part.exchanges:picked", "int(places[0])", "0",
        T + "pooled", "domain=2"),
    bug("blocks of uneven ranks are put end to end", "part.gathering:_in_blocks", "rank * most : rank * most + count",
        "rank * count : rank * count + count", M + "gpt2", "tp=2,sp=true"),
    bug("a resize takes the factor for its inverse", "part.rules.resize_tables:_ratio", "kind(1.0 / table.scale)",
        "kind(table.scale)", T + "pooled", "domain=2"),
    bug("a window at the padding's end is kept", "part.rules.pooling:_outputs", "(size - 1) * stride >= n + padding",
        "(size - 1) * stride > n + padding", T + "pooled", "domain=2"),
    bug("a field is reflected with its edge twice", "part.rules.padding:_source", "2 * (n - 1) - places",
        "2 * n - 1 - places", T + "pooled", "domain=2"),
]  # fmt: skip

PARALLEL = [
    bug("stand-ins count in a batch norm", "parallel.batchnorm:_Over.of", "float(self.counts) * x.numel()",
        "x.numel()", HERE + "few_images", "dp_replicate=3,accumulate=2"),
    bug("replicated gradients are in the norm of each rank", "parallel.expert.reduce:WithExperts.__init__",
        "technique.in_pieces or self._rank(technique, 0) == 0", "True", M + "moe", "dp_shard=2,ep=2,zero=0",
        clip_norm=0.1),
    bug("a ring keeps the last pair's gradient of values", "parallel.sequence.rounds:backward_around",
        "dv[:, :, columns] += ", "dv[:, :, columns] = ", M + "decoder", "cp=2"),
    bug("gradients of keys that all heads have are one rank's", "parallel.sequence.ring_plan:Layers.gradient",
        "Sum(payload, queries.inner.axis, spread=False)", "payload", HERE + "one_key_head", "cp=2,tp=2"),
    bug("every rank takes the first heads' mask", "parallel.sequence.ring_plan:HeadsHere.mask",
        "inner.dim_cut, inner.axis.index)", "inner.dim_cut, 0)", T + "biased", "cp=2,tp=2"),
    bug("calls inside one that is left out do not count", "parallel.pipeline.stage:StagedModule._leave_out",
        "self._counts.get(child, 0) + 1", "self._counts.get(child, 0)", "pipeline_tasks:reused_block", "pp=2"),
    bug("masters begin with another piece of a weight", "parallel.flat:Flat.load_masters",
        "first = part.low - entry.start", "first = 0", NARROW,
        "dp_shard=2,zero=1,precision=bf16"),
]  # fmt: skip

TIERS = [
    bug("views are read back from their storage's beginning", "tiers.activations:Saved.hollow",
        "lowest.storage_offset())", "0)", T + "halves", "dp_replicate=2,offload=activations:disk"),
]  # fmt: skip

ROLLOUTS = [
    bug("a curriculum stays at its first length", "rollouts:_Growing.__call__", "reversed(self.curriculum)",
        "self.curriculum", T + "growing_forecast", TWO),
    bug("a roll-out's weight leaves its steps' weights out", "rollouts:_Loss.__call__", "weight + factor * of",
        "weight + of", T + "forecast", TWO),
]  # fmt: skip

SCRIPTS = [
    bug("the first rank that is no holder counts too", "scripts.dealt:deal", "if rank < holders else",
        "if rank <= holders else", "image_classifier.py :15]=:17]", "dp_replicate=4"),
    bug("clipping enlarges small gradients alone", "scripts.stepping:Stepping.clip_grad_norm_",
        "if gradients and factor < 1.0", "if gradients and factor > 1.0", "char_gpt.py", TWO),
]  # fmt: skip

HELD_OUT = (STEP + LAYOUT + DATA + TRAINING + CHECKPOINT + PRECISION + RANDOM + PART + PARALLEL + TIERS
            + ROLLOUTS + SCRIPTS)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], HELD_OUT))
