"""One rank of a run: `parallelize` builds an `Engine` from a task and a plan; whole weights and state in and out.

    parallelize(task, plan) -> Engine              one rank of a plan, its weights in place
    Engine.step(batch) -> StepResult               one optimizer step on a global batch, or on this rank's `Share`s
    Engine.evaluate(batches) -> (sum, weight)      of the loss, over all ranks
    Engine.predict(batches)                        outputs in the order of samples on rank 0, None on other ranks
    Engine.full_parameters(), full_gradients(), full_optimizer_state(), full_buffers()
                                                   iterators of (name, whole tensor or state)
    Engine.state_dict(), save_weights(path)        whole weights on the CPU, on every rank; into safetensors
    Engine.memory(), observe(), around(part, make) bytes held; a ledger of collectives; a context around parts of a step

All but `memory`, `observe` and `around` are collective: every rank calls them.
"""
