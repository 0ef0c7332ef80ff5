"""Pipeline parallelism: a module's forward cut into stages, each on ranks of its own.

    cuts       where the forward can be cut, and where it is best cut
    placed     which rank holds which parameter and buffer
    stage      the module that runs one stage's part of its own forward
    backward   a backward in two parts: gradient of the input, gradients of the weights
    messages   hidden states and their gradients between ranks
    tape       gradients that the forward takes itself, through several stages (inner, shared, serving, talk)

The order in which ranks run stages is data (`layout/schedules.py`); the step executes it (`step/pipelined.py`).
"""
