"""Bugs on both sides that plans of several axes meet, with all that a run has beside its steps.

python tests/mutations/combined.py [WORD ...]     plant them, tell which are caught, and the share

Ranks share tp, dp_shard and pp; runs accumulate, clip, follow a schedule, average, evaluate, keep the best weights and
write checkpoints, in bf16 or fp16; `checks.gone_on_elsewhere` goes on with a checkpoint under a plan of other axes.
Each edit was written down before the first of them ran: 8 of 10 were found as they were. One had a check that took a
seed for both runs; the step of the best weights, which nobody compared, is found since.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("", "tasks", "kit")]

from mutations.both import NARROW, main  # noqa: E402
from mutations.bugs import M, bug  # noqa: E402

ALL = "dp_shard=2,tp=2,pp=2,zero=1,microbatches=2"
FP16 = "dp_shard=2,pp=2,zero=2,microbatches=2,precision=fp16"
RUN = f"{NARROW} train.keep_best=true"
ELSEWHERE = "check:gone_on_elsewhere"

COMBINED = [
    bug("a stage's norm is that of its first shard", "step.pipelined:agree_stages",
        "own.square_norms[: state.mesh.shard.size] if", "own.square_norms[:1] if", M + "decoder_tied",
        "dp_shard=2,tp=2,pp=2,zero=2,microbatches=2", clip_norm=0.1),
    bug("stages before the last keep a loss scale of their own", "step.pipelined:agree_stages",
        "state.scale.value = scale", "pass", RUN, FP16),
    bug("gradients are reduced after each round of a schedule", "step.pipelined:run_schedule",
        "last=ends and place == final", "last=place == final", M + "decoder_tied",
        "dp_shard=2,pp=2,zero=1,microbatches=2,accumulate=2"),
    bug("the last stage's output reaches the loss narrow", "step.staged:StagedForward.stage",
        "self.precision.cast_outputs(output) if index == self.last else output", "output", RUN,
        f"{ALL},precision=bf16"),
    bug("an average is the weights themselves", "engine.ema:Ema.__init__", "master.detach().clone() for",
        "master.detach() for", RUN, f"{ALL},precision=bf16"),
    bug("a short batch is not evaluated", "data.evaluation:evaluation_parts", "steps.walk(0, length)",
        "steps.walk(0, length - length % batch_size)", RUN, f"{ALL},precision=bf16"),
    bug("a step that is skipped is no step of the schedule", "step.train_step:_done", "state.steps_done += 1",
        "state.steps_done += updated", RUN, FP16),
    bug("the best weights are told to be of the step before", "training.loop:_Rank._keep_best", '"step": steps,',
        '"step": steps - 1,', RUN, f"{ALL},precision=bf16"),
    bug("a run that goes on has the loss scale of a new one", "checkpoint.load:restore",
        'engine.state.scale.load_state_dict(state["scale"])', "pass", ELSEWHERE, "dp_shard=2,tp=2,zero=1"),
    bug("what was loaded is not published", "checkpoint.load:restore", "engine.technique.publish()", "pass",
        ELSEWHERE, "dp_shard=2,tp=2,zero=1"),
]  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], COMBINED))
