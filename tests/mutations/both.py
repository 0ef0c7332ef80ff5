"""Bugs planted on both sides of a proof: in the ranks and in the one process, which import the same source.

python tests/mutations/both.py [WORD ...] [--thorough]     plant them, tell which are caught, and the share
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("", "tasks", "kit")]

from mutations.both_rooms import ROOMS  # noqa: E402
from mutations.bugs import HERE, M, bug  # noqa: E402
from mutations.plant import Bug, BuggyPool, NotPlanted, planted  # noqa: E402
from mutations.run import CHECK, FAILS, _caught, _check_fails, _proof  # noqa: E402
from shardwise.errors import ShardwiseError  # noqa: E402
from shardwise.ranks import RankPool  # noqa: E402

RUN, NARROW, WHOLE = "mutations/run.toml", "mutations/narrow.toml", "mutations/both.toml"
SCALED = "mutations/scaled.toml"
TWO, MICRO = "dp_replicate=2", "dp_replicate=2,accumulate=2"
BF16, FP16 = "dp_replicate=2,precision=bf16", "dp_replicate=2,precision=fp16"

DEALING = [
    bug("the last sample of a cut is lost", "layout.dealing:cut", "length * (index + 1) // pieces",
        "length * (index + 1) // pieces - (index == pieces - 1 and length > pieces)", M + "mlp", MICRO),
    bug("the last sample of a batch is in no micro-batch", "layout.dealing:micro_batches",
        "cut(samples, accumulate, i)", "cut(samples - 1, accumulate, i)", M + "mlp", MICRO),
    bug("the last rank's last sample is dealt to nobody", "layout.dealing:deal", "low + stop",
        "low + stop - (rank == ranks - 1)", M + "mlp", TWO),
    bug("a third rank begins a sample late", "layout.dealing:deal", "low + start,",
        "low + start + (rank == 2 and stop - start > 1),", M + "mlp", TWO),
    bug("micro-batches lose their last sample", "step.batching:_slice", "leaf[low:high]",
        "leaf[low : max(low + 1, high - 1)]", M + "mlp", MICRO),
    bug("a short micro-batch is given one sample more", "step.batching:_slice", "leaf[low:high]",
        "leaf[low : high + (high - low) % 2]", M + "mlp", MICRO),
]  # fmt: skip

LOSS = [
    bug("the weight is doubled", "step.loss:read_loss", 'weight, "weight")', 'weight, "weight") * 2', M + "mlp", TWO),
    bug("extra terms are dropped", "step.loss:read_loss", "{k: _extra(k, v) for k, v in extras.items()}", "{}",
        M + "moe", TWO),
    bug("extra terms are halved", "step.loss:_extra", "Extra(value.reshape(()), weight)",
        "Extra(value.reshape(()) * 0.5, weight)", M + "moe", TWO),
    bug("an extra's own weight is forgotten", "step.loss:_extra",
        "value, weight = value[0], _number(value[1], f\"weight of extra '{name}'\")", "value, weight = value[0], None",
        M + "moe", TWO),
    bug("keywords of the model are dropped", "task:call_arguments", "return call[0], call[1]",
        "return call[0], {}", HERE + "scaled_by_keyword", TWO),
]  # fmt: skip

OPTIMIZER = [
    bug("biases are in no group", "step.task_optimizer:named_groups", "param.dim() < 2]", "param.dim() < 1]", RUN, TWO),
    bug("no decay is a little one", "step.task_optimizer:named_groups", '"weight_decay": 0.0', '"weight_decay": 0.05',
        RUN, TWO),
    bug("matrices do not decay", "step.task_optimizer:named_groups", '"name": "decay", "params": decay',
        '"name": "decay", "params": decay, "weight_decay": 0.0', RUN, TWO),
    bug("the rate of a task's own optimizer is not scaled", "training.optimizer_section:_scale",
        'group["lr"] *= factor', "pass", SCALED, TWO),
    bug("linear and sqrt are swapped", "training.learning_rates:scaled_lr", 'rule == "linear"', 'rule == "sqrt"',
        WHOLE, TWO),
    bug("the warm-up begins at nothing", "training.learning_rates:warmed_up", "(step + 1)", "step", RUN, TWO),
    bug("the cosine falls beyond the end", "training.learning_rates:cosine", "total - warmup)", "total)", RUN, TWO),
    bug("the factor is taken twice", "step.train_step:_set_learning_rate", "base * factor", "base * factor**2", RUN,
        TWO),
]  # fmt: skip

RANDOM = [
    bug("masks are those of the first step", "random.modes:GlobalRandom.begin",
        'seed_of("mask", seed, step, micro_batch)', 'seed_of("mask", seed, 0, micro_batch)', M + "decoder_dropout",
        TWO),
    bug("masks are those of the first micro-batch", "random.modes:GlobalRandom.begin",
        'seed_of("mask", seed, step, micro_batch)', 'seed_of("mask", seed, step, 0)', M + "decoder_dropout", MICRO),
    bug("half as much is dropped", "random.hashing:_limit", "rate * 2.0**53", "rate * 2.0**52", M + "decoder_dropout",
        TWO),
    bug("uniform numbers go to two", "random.variates:uniform", "2.0**-53", "2.0**-52", "unusual_tasks:variational",
        TWO),
    bug("normal numbers are too narrow", "random.variates:normal", "-2 *", "-1 *", "unusual_tasks:variational", TWO),
]  # fmt: skip

DATA = [
    bug("every epoch has the order of the first", "data.order:Order.indices", "self._within(epoch,",
        "self._within(0,", RUN, TWO),
    bug("no epoch is shuffled", "data.order:Order._within", "if self.shuffle:", "if False:", RUN, TWO),
    bug("a sample is read twice and another never", "data.order:Order._within", "return places.astype(np.int64)",
        "return (places // 2 * 2).astype(np.int64)", RUN, TWO),
    bug("held-out data are the first samples alone", "training.held_out:Spread.read", "index)[0] for", "0)[0] for",
        RUN, TWO),
    bug("a run over epochs is a step short", "training.job:_steps", "math.ceil(", "math.floor(", SCALED, TWO),
]  # fmt: skip

BESIDE = [
    bug("the average is inverted", "engine.ema:Ema.update", "1 - self.decay", "self.decay", RUN, TWO),
    bug("a swap is not published", "engine.ema:Ema._swap", "self.technique.publish()", "pass", NARROW, BF16),
    bug("weights are rounded before they are averaged", "engine.ema:Ema.update", "master.detach() for master",
        "master.detach().bfloat16().float() for master", NARROW, BF16),
    bug("the best weights are the worst", "training.loop:_Rank._keep_best", 'loss < best["eval_loss"]',
        'loss > best["eval_loss"]', WHOLE, TWO),
    bug("a skipped step goes into the average", "training.loop:_Rank._step",
        "self.ema is not None and not result.skipped", "self.ema is not None", NARROW, BF16),
    bug("the file at the end is rounded", "engine.weights_file:WeightsFile.add", "tensor.detach().resolve_conj()",
        "tensor.detach().bfloat16().float()", NARROW, BF16),
    bug("metrics forget the weight of earlier micro-batches", "step.task_metrics:MetricTally.add",
        "before[1] + weight", "weight", RUN, MICRO),
]  # fmt: skip

DTYPES = [
    bug("reduce_dtype is ignored", "precision:Precision.of",
        'row.summed if plan.reduce_dtype == "auto" else plan.reduce_dtype', "row.summed", NARROW,
        BF16 + ",reduce_dtype=bf16"),
    bug("gradients are summed in 16 bits", "precision:Precision.of",
        'row.summed if plan.reduce_dtype == "auto" else plan.reduce_dtype', "row.compute", NARROW, BF16),
    bug("the loss reads 16 bits", "precision:Precision.cast_outputs",
        "wide = torch.promote_types(self.compute, torch.float32)", "wide = self.compute", NARROW, BF16),
    bug("the loss scale grows by four", "step.scaler:LossScale.update", "self.value *= 2", "self.value *= 4", NARROW,
        FP16),
    bug("the loss scale never grows", "step.scaler:LossScale.update", "self.value *= 2", "pass", NARROW, FP16),
]  # fmt: skip

PARTS = [
    bug("later rows of a causal block are masked as the first", "parallel.sequence.block_attention:_scores",
        ".tril(first)", ".tril(0)", M + "decoder", "cp=2"),
    bug("the third rank's gradients are doubled", "parallel.replicate:Replicate._reduce",
        "assert bucket.buffer is not None", "bucket.buffer.mul_(1 + (self.axis.index == 2))", M + "mlp", TWO),
    bug("a row of many runs is off by one where it is gathered in rounds", "comm.together:_finished",
        "zip(some, _tables(rows, axis), strict=True)", "zip(some, _tables(rows, axis)[::-1], strict=True)",
        HERE + "momentum", "dp_shard=2,zero=2"),
]  # fmt: skip

BOTH = DEALING + LOSS + OPTIMIZER + RANDOM + DATA + BESIDE + DTYPES + PARTS + ROOMS


def try_both(planted_bug: Bug, pool: Any, *, thorough: bool = False) -> tuple[str, int]:
    """What caught it, "" where nothing did, and how often it ran in both; planted in this process and in the ranks."""
    is_task = not any(kind in planted_bug.task for kind in (".toml", ".py", CHECK))
    options = planted_bug.options | ({"thorough": True} if thorough and is_task else {})
    buggy = BuggyPool(pool, planted_bug)
    with planted(planted_bug) as here:
        try:
            if planted_bug.task.startswith(CHECK):
                return _check_fails(planted_bug, buggy)[0], here() + buggy.ran
            parity = _proof(Bug(**{**vars(planted_bug), "options": options}), buggy)
        except NotPlanted:
            raise
        except Exception as error:  # of the one process too, which has the bug
            kind = "" if isinstance(error, ShardwiseError) else f"{type(error).__name__}: "
            return FAILS + kind + str(error).splitlines()[0], here() + buggy.ran
        return _caught(parity)[0], here() + buggy.ran


def main(words: list[str], bugs: list[Bug] | None = None) -> int:
    """Exit code 1 where a bug never ran."""
    thorough = "--thorough" in words
    words = [word for word in words if not word.startswith("--")]
    chosen = [one for one in (bugs or BOTH) if not words or any(word in f"{one.name} {one.where}" for word in words)]
    missed, unmet = [], []
    with RankPool(quiet=True) as pool:
        for number, one in enumerate(chosen, 1):
            start = time.monotonic()
            caught, ran = try_both(one, pool, thorough=thorough)
            missed += [] if caught else [one.name]
            unmet += [] if ran else [one.name]
            print(f"{number}/{len(chosen)} {one.room}: {one.name}: {caught or 'NOT CAUGHT'}"
                  f"{'' if ran else ' BUT NEVER RAN'} ({time.monotonic() - start:.0f} s)", flush=True)  # fmt: skip
    print(f"{len(chosen) - len(missed)} of {len(chosen)} caught; not: {'; '.join(missed)}; never ran: {unmet}")
    return 1 if unmet else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
