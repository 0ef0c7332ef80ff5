"""Recurrent layers in a trace as a GPU runs them: one call of cuDNN for each layer and direction, not one op a step.

    torch._VF.lstm, gru, rnn_tanh, rnn_relu      padded or packed    ->  for each layer and direction:
        recurrent(x, states, weights)            output (rows, H), last states, and what backward reads of the rows
        recurrent_backward(...)                  gradients of all three

`states` (n, B, H) is the hidden state and, in an LSTM, the cell. Of each row of a layer its backward reads the gates
and the cell, (gates + 1) x H numbers of an LSTM and of a GRU, which has an inner term besides its gates; of others H.

What this does not do: know which of its algorithms cuDNN takes (a persistent one is faster where the state is small),
run layers beside each other as it does, be differentiated twice (cuDNN cannot), project states (`proj_size`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.part.levels import Distributed

RECURRENT: dict[Any, int] = {torch.lstm: 4, torch.gru: 3, torch.rnn_tanh: 1, torch.rnn_relu: 1}  # gates of each


@torch.library.custom_op("shardwise::recurrent", mutates_args=())
def recurrent(x: Tensor, states: Tensor, weights: Sequence[Tensor], steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns output (..., H) of x (..., F) over `steps` steps, last states, what backward reads. Without values."""
    raise NotImplementedError("a trace has no values")


@torch.library.custom_op("shardwise::recurrent_backward", mutates_args=())
def recurrent_backward(
    gradient: Tensor, x: Tensor, states: Tensor, weights: Sequence[Tensor], kept: Tensor, steps: int
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Returns the gradients of x, states and weights. For tensors without values."""
    raise NotImplementedError("a trace has no values")


@recurrent.register_fake
def _(x: Tensor, states: Tensor, weights: Sequence[Tensor], steps: int) -> tuple[Tensor, Tensor, Tensor]:
    hidden, gates = states.shape[-1], weights[0].shape[0]
    return (
        x.new_empty(*x.shape[:-1], hidden),
        torch.empty_like(states),
        x.new_empty(*x.shape[:-1], gates + hidden if gates > hidden else hidden),
    )


@recurrent_backward.register_fake
def _(
    gradient: Tensor, x: Tensor, states: Tensor, weights: Sequence[Tensor], kept: Tensor, steps: int
) -> tuple[Tensor, Tensor, list[Tensor]]:
    return torch.empty_like(x), torch.empty_like(states), [torch.empty_like(weight) for weight in weights]


def _keep(ctx: Any, inputs: tuple, output: tuple) -> None:
    x, states, weights, ctx.steps = inputs
    ctx.save_for_backward(x, states, output[2], *weights)
    ctx.set_materialize_grads(True)


def _back(ctx: Any, gradient: Tensor, *others: Tensor) -> tuple[Tensor, Tensor, list[Tensor], None]:
    x, states, kept, *weights = ctx.saved_tensors
    return *recurrent_backward(gradient, x, states, weights, kept, ctx.steps), None


recurrent.register_autograd(_back, setup_context=_keep)


def as_one_call(
    func: Callable, args: tuple, kwargs: dict, dropout: Callable[[Tensor, float], Tensor]
) -> tuple[Tensor, ...] | None:
    """Returns a recurrent function's results (output, states, ...) by one call a layer and direction, or None.

    None: the function is to run as it is. `dropout` is applied between layers.
    """
    if kwargs or len(args) != 9:  # not called as torch's own layers do
        return None
    packed = isinstance(args[3], list | tuple)  # data, batch_sizes, hx, weights, ...; else x, hx, weights, ...
    x, hx, flat = (args[0], args[2], args[3]) if packed else (args[0], args[1], args[2])
    biases, layers, drop, trains, both = args[4:] if packed else args[3:8]
    batch_first = not packed and args[8]
    states = list(hx) if isinstance(hx, list | tuple) else [hx]
    per_layer = 4 if biases else 2
    directions = 2 if both else 1
    tensors = [x, *states, *flat]
    # a cut layer has a rule of its own (part/rules/recurrent); under a transform of torch.func this call has none
    if any(isinstance(t, Distributed) or not t.is_floating_point() for t in tensors) or _transformed(tensors):
        return None
    if len(flat) != per_layer * layers * directions or flat[1].shape != (
        RECURRENT[func] * states[0].shape[-1],
        states[0].shape[-1],
    ):
        return None  # states are projected
    steps = args[1].shape[0] if packed else x.shape[1 if batch_first else 0]
    ends: list[Tensor] = []
    for layer in range(layers):
        outs = []
        for place in range(layer * directions, (layer + 1) * directions):
            state = torch.stack([initial[place] for initial in states])
            out, end, _ = recurrent(x, state, list(flat[per_layer * place : per_layer * (place + 1)]), steps)
            outs.append(out)
            ends.append(end)
        x = torch.cat(outs, dim=-1) if both else outs[0]
        if drop and trains and layer + 1 < layers:
            x = dropout(x, drop)
    return x, *torch.stack(ends, dim=1).unbind()


def _transformed(tensors: Sequence[Tensor]) -> bool:
    return any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in tensors)
