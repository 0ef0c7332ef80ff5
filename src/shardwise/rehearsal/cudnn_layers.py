"""Recurrent layers in a trace as a GPU runs them: one op for each layer and direction, not one op a time step.

    torch._VF.lstm, gru, rnn_tanh, rnn_relu      padded or packed    ->  for each layer and direction:
        recurrent(x, states, weights)            output (tokens, H), last states, and the reserve that backward reads
        recurrent_backward(...)                  gradients of x, states and weights

A token is one time step of one sequence. `states` (n, B, H) is the hidden state and, in an LSTM (n = 2), the cell. For
each token the reserve holds gates and cell, (gates + 1) x H numbers, in an LSTM and in a GRU (whose "+ 1" is the inner
term of its candidate); in a plain RNN it holds H numbers.

What this does not do: know which of its algorithms cuDNN takes (a persistent one is faster if the state is small),
run layers beside each other as cuDNN does, be differentiated twice (cuDNN cannot), project states (`proj_size`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.part.levels import Distributed

RECURRENT: dict[Any, int] = {torch.lstm: 4, torch.gru: 3, torch.rnn_tanh: 1, torch.rnn_relu: 1}  # number of gates


@torch.library.custom_op("shardwise::recurrent", mutates_args=())
def recurrent(x: Tensor, states: Tensor, weights: Sequence[Tensor], steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (output (..., H), last states (n, B, H), reserve for backward) of x (..., F); for fake tensors alone.

    weights  w_ih (gates x H, F), w_hh (gates x H, H), then the biases if there are any
    steps    number of time steps, which only the count of operations reads
    """
    raise NotImplementedError("a trace has no values")


@torch.library.custom_op("shardwise::recurrent_backward", mutates_args=())
def recurrent_backward(
    gradient: Tensor, x: Tensor, states: Tensor, weights: Sequence[Tensor], kept: Tensor, steps: int
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Returns the gradients of (x, states, weights); `kept`: the reserve of `recurrent`. For fake tensors alone."""
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
    """Returns (output, last hidden state[, last cell]) of a recurrent function, computed by `recurrent`, or None.

    func     a key of `RECURRENT`, called with `args` and `kwargs`; None is returned if the caller has to call it as is
    dropout  (tensor, probability) -> tensor, applied between layers in training
    """
    if kwargs or len(args) != 9:  # not called as torch's own layers do
        return None
    packed = isinstance(args[3], list | tuple)  # (data, batch_sizes, hx, weights, ...); else (x, hx, weights, ...)
    x, hx, flat = (args[0], args[2], args[3]) if packed else (args[0], args[1], args[2])
    biases, layers, drop, trains, both = args[4:] if packed else args[3:8]  # both: bidirectional
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
        return None  # the hidden state is projected (`proj_size`), which `recurrent` has no shape for
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
