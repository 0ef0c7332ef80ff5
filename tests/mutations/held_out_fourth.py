"""A fourth set of bugs on both sides that were drawn before anybody saw whether a proof finds them.

python tests/mutations/held_out_fourth.py [WORD ...] [--thorough]     plant them, tell which are caught, and the share

`random.Random(20261130)` shuffled the sorted names of each room's functions, room by room in alphabetical order; no
function of the other sets is among them. Of each list the first ones were taken that decide a number of a run or of its
checkpoint, as many as the room has places (part 7, parallel, data, training 5, step, engine 4, random 3, trace, layout
and comm 2, the others 1). Passed over: what decides messages, refusals, names or times, how work is dealt where any
dealing gives the same numbers, forecasts, what scripts alone call, readers of files of fields, resuming, predictions.
Each edit was written down before the first of them ran.

Of 44 six are left out since. Two functions are called while their module is imported; one is for scripts alone. Three
edits change no number: buckets that are kept spare memory; a made-up gradient is NaN, and nobody reads it; what a tape
lacks is built without it, and told. Six had a task that did not meet the edit, and were found at once with another one.

Of the other 32 27 were found as they were, one of them by `--thorough` alone; with those six 33 of 38 (87%). Five were
not: labels of digits, ends of texts, answers in chats, sizes of a built-in model, counts in a checkpoint. All are found
since; ends of texts where the built-in task reads them, and not where a task of one's own calls `tokenized`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("", "tasks", "kit")]

from mutations.both import BF16, NARROW, RUN, SCALED, TWO, main  # noqa: E402
from mutations.bugs import HERE, M, bug  # noqa: E402

T = "mutations.held_out_fourth_tasks:"
THIRD = "mutations.held_out_third_tasks:"
EXPERTS, WORDS, TOKENS = (f"mutations/{name}.toml" for name in ("experts", "words", "tokens"))

PART = [
    bug("two windows are taken to reach as far as the first", "part.tiles.deep:widened",
        "_common(tuple(margin.ranges[place] for margin in margins))", "margins[0].ranges[place]",
        "domain_tasks:plain_stack", "domain=2,domain_depth=3"),
    bug("dims that a reduction keeps are counted off", "part.dimwise:_behind", "gone * sum(", "sum(", T + "levelled",
        "domain=2"),
    bug("the rows behind a tile are kept as those in front", "part.tiles.saved_halos:kept_apart",
        "inside.narrow(dim, n - behind, behind).clone()", "inside.narrow(dim, 0, behind).clone()",
        "mutations.held_out_second_tasks:segments", "domain=2"),
    bug("a place from the end is counted from the beginning", "part.rules.slices:_slice_of",
        "index = _from_start(start, x.shape[dim])", "index = start", T + "scattered", "cp=2"),
    bug("keywords beside assigned data are dropped", "part.assigned:Written.__torch_function__",
        "(args, kwargs or {}))", "(args, {}))", T + "assigned", "domain=2"),
    bug("a sum that is waited for loses its bias", "part.sum_rules:_like", "first.origin, added, first.spread",
        "first.origin, None, first.spread", M + "gpt2", "tp=2"),
]  # fmt: skip

PARALLEL = [
    bug("a block of a mask is that of the columns and the rows", "parallel.sequence.pair_mask:PairMask.block",
        "MaskBlock(self, rows, columns)", "MaskBlock(self, columns, rows)",
        "mutations.held_out_second_tasks:granite", "cp=2"),
    bug("what the next stage sent goes back a round late", "parallel.pipeline.stage_gradients:Tape.answer",
        "self.rounds.index(target) + 1", "self.rounds.index(target) + 2", "taken_tasks:residual", "pp=2"),
    bug("a stage has what later forwards read inside others", "parallel.pipeline.cut_points:_add_used",
        "and not op.inner", "and op.inner", T + "remembers", "pp=2", steps=4),
]  # fmt: skip

STEP = [
    bug("a pipeline's masks begin with each rank's share", "step.pipelined:_Row._meet", "Samples(part.start, ",
        "Samples(0, ", M + "decoder_dropout", "dp_replicate=2,pp=2,microbatches=2,remat=full"),
    bug("what is left of the runs is in no norm", "step.normalise:_norms_of_runs", "if whole < len(flat):",
        "if whole < len(flat) and not rows:", HERE + "several_buckets", TWO),
    bug("samples that all ranks have count on each", "step.state:RankState.same_samples", '== "model"',
        '== "global"', "remembering_tasks:averaged_on_all", TWO),
    bug("outputs reach the loss as the model gives them", "step.forward:Forward._output",
        "self.precision.cast_outputs(self.module(*args, **kwargs))", "self.module(*args, **kwargs)",
        f"{NARROW}", BF16),
]  # fmt: skip

DATA = [
    bug("digits have the labels of the first ones", "data.digits:DigitsSource.__init__", "labels[chosen]",
        "labels[: len(chosen)]", f"{SCALED} task.name=digits", TWO),
    bug("texts follow without an end", "data.tokenized:_write", "tokenizer.encode(text) + end",
        "tokenizer.encode(text)", "mutations/texts.toml", TWO),
    bug("blanks behind an answer's mark are learned", "data.chat:ChatTemplate._end",
        "return end if end > first and", "return last if end > first and", f"{SCALED} task.name={T}chats", TWO),
    bug("a rank's samples are the first of the micro-batch", "data.steps:Steps._dealt", "start=offset,", "start=0,",
        RUN, TWO),
]  # fmt: skip

TRAINING = [
    bug("the model's section of a built-in task is ignored", "training.job:_without_adapters",
        "resolve_task(section.name, section)", "resolve_task(section.name)", WORDS, TWO),
    bug("the schedule's end is not reached", "training.learning_rates:_progress", "step / length))",
        "step / (length + 1)))", RUN, TWO),
    bug("the last checkpoint is not that of the end", "training.keeping:Keeper.end",
        "(self.every or self._saves or self.job.resume is not None)", "self.job.resume is not None", RUN, TWO),
    bug("a task's batches come a step late", "training.rank_parts:batches_of", "batch_of(task, step)",
        "batch_of(task, step + 1)", EXPERTS, TWO),
    bug("the order's seed is that of no run", "training.rank_parts:loader_of", "config.train.seed)",
        "config.train.seed + 1)", RUN, TWO),
]  # fmt: skip

ENGINE = [
    bug("marks on parameters are lost", "engine.recipe:apply_plan", "if param.__dict__}", "if not param.__dict__}",
        T + "marked", "dp_shard=2,zero=1"),
    bug("whole gradients are those of the first weight", "engine.whole:full_gradients",
        "state.technique.full_gradient(i)", "state.technique.full_gradient(0 * i)", M + "mlp", TWO),
    bug("any optimizer takes pieces", "engine.optimizer:_same", "<= bar for", ">= 0 for", THIRD + "normed",
        "dp_shard=2,zero=1"),
    bug("what other stages hold arrives as real numbers", "engine.whole:_handed_out", "dtype=DTYPES[kind],",
        "dtype=torch.float64,", M + "unet_batchnorm", "pp=2,microbatches=2"),
]  # fmt: skip

RANDOM = [
    bug("chances of elements are those against them", "random.draws:_bernoulli_of", "< probabilities).to",
        "> probabilities).to", T + "chosen", TWO),
    bug("a normal number's mean is left out", "random.draws:_normal_of_floats", "* std + mean", "* std",
        T + "shifted", TWO),
]  # fmt: skip

TRACE = [
    bug("what a trial writes into is kept by name", "trace.module_state:_copied", "value.detach().clone(),",
        "value.detach(),", "module_tasks:counting", "tp=2"),
]  # fmt: skip

LAYOUT = [
    bug("a rank's last piece is in no node", "layout.batch_pieces:BatchPieces.runs", "first + self.per_rank)",
        "first + max(1, self.per_rank - 1))", M + "decoder", "dp_replicate=2,deterministic=true"),
    bug("gradients of weights that wait are left out", "layout.schedule_kinds:_in_turns", "return row + pending",
        "return row", M + "decoder", "pp=2,schedule=zbh1,microbatches=3"),
]  # fmt: skip

COMM = [
    bug("what is written into a bucket's part is lost", "comm.buckets:Bucket.view", "self.views_now[place]",
        "self.views_now[place].clone()", "module_tasks:routed_experts", TWO),
    bug("tensors that travel together overlap", "comm.together:_tables", "-(-row.nbytes // _UNIT) * _UNIT",
        "row.nbytes // _UNIT * _UNIT", HERE + "momentum", "dp_shard=2,zero=2"),
]  # fmt: skip

REST = [
    bug("a checkpoint is a step behind", "checkpoint.save:Saver._work", '"steps": engine.steps_done,',
        '"steps": engine.steps_done - 1,', RUN, TWO),
    bug("norms of several dtypes are computed in the narrow one", "precision:_OneDtype.__torch_function__",
        "if func in _KEEP else self.dtype", "if func is None else self.dtype", f"{NARROW} task.name={T}wide_norm",
        BF16),
    bug("a block run again looks once at what it changes", "memory.recompute:recompute_block",
        "changing = changes(before)", "changing = []", "module_tasks:norm_cumulative",
        "dp_replicate=2,remat=selective"),
    bug("few steps of a roll-out have the last weights", "rollouts:_Steps.factors", "self.weights[:count]",
        "self.weights[-count:]", T + "weighted_curriculum", TWO),
    bug("layers with transposed weights have no adapters", "adapters.targets:_is_transposed",
        'startswith("transformers.")', 'startswith("torch.")',
        f"{EXPERTS} task.name=pipeline_tasks:hf_gpt2 lora.rank=2 lora.targets=['all-linear']", TWO),
]  # fmt: skip

HELD_OUT_FOURTH = PART + PARALLEL + STEP + DATA + TRAINING + ENGINE + RANDOM + TRACE + LAYOUT + COMM + REST

if __name__ == "__main__":
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()  # tokens are written while a bug is planted
    sys.exit(main(sys.argv[1:], HELD_OUT_FOURTH))
