"""One optimizer step of one rank, as functions of its `RankState`: micro-batches, reduction, the update.

train_step(state, parts) -> StepResult         parts: list[Share], as dealt(state, batch) makes them
gradients(state, parts) -> (StepResult, usable) forward, backward, sums; `usable`: whether the update may be done
complete(state, tally) -> (StepResult, usable)  after the caller's own backwards: sums over ranks, division, clipping
update(state, step)                            calls the optimizer's `step`, then publishes the new weights
"""
