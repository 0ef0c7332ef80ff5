"""One optimizer step of one rank, as functions of its `RankState`: micro-batches, reduction, the update.

train_step(state, parts) -> StepResult         parts: list[Share], as dealt(state, batch) makes them
gradients(state, parts) -> (StepResult, usable)
complete(state, tally) -> (StepResult, usable) after backwards of one's own: summed, divided, clipped
update(state, step)                            the optimizer's step with what its pieces need; publishes
"""
