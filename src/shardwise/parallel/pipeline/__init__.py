"""Pipeline parallelism: a module's forward is split into stages, each on other ranks.

    cut_points       where the forward can be split, and where it is best split (balance, skips, lasting, chance, hooks)
    boundaries       data: boundaries, stages, and which rank holds which parameter and buffer
    stage            runs one stage's part of the module's own forward (left_out)
    backward         a backward in two parts, gradients of the input and gradients of the weights
    stage_messages   hidden states and their gradients between ranks
    stage_gradients  gradients that the forward itself computes, through several stages (inner)

The order in which ranks run stages is data (`layout/schedules.py`), which `step/pipelined.py` executes.
"""
