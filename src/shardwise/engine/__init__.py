"""One rank of a run: `parallelize` builds an `Engine` from a task and a plan; whole weights and state in and out.

    parallelize(task, plan) -> Engine              one rank of a plan, its weights in place
    Engine.step(batch) -> StepResult               of a global batch on the CPU, or of this rank's list of `Share`
    Engine.evaluate(batches) -> (sum, weight)      over all ranks
    Engine.predict(batches)                        outputs in the order of samples on rank 0, None elsewhere
    Engine.full_parameters(), full_gradients(), full_optimizer_state(), full_buffers()
                                                   iterators of (name, whole tensor or state)
    Engine.state_dict(), save_weights(path)        whole weights on the CPU, on every rank; into safetensors
    Engine.memory(), observe(), around(part, make) bytes; a ledger of collectives; a context around parts of a step

All but `memory`, `observe` and `around` are collective: every rank calls them.
"""
