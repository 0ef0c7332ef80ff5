"""Operations that read all positions of a sequence at once, done whole by every rank: alignments, packed sequences.

    ctc_loss               (T, B, C) gathered, the loss of each sequence on every rank; backward gathers again, and each
                           rank keeps its positions of the gradient
    pack_padded_sequence   (B, S, H) gathered; rows, and the recurrence over them, on every rank

Bytes received by a rank: (p-1)/p of the tensor, in forward; of `ctc_loss` as many in backward.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.part.cuts import Uncut
from shardwise.part.gathering import gathered
from shardwise.part.tensor import GATHERS, Part, is_part, no_rule, parts_in, rule
from shardwise.trace.leaves import replaced


@rule("_ctc_loss", "_pack_padded_sequence")
def whole_sequences(func: Any, args: tuple, kwargs: dict) -> Any:
    """The operation on whole tensors, on every rank, where what is cut are positions."""
    return func(*_whole(func, args), **kwargs)


@rule("_ctc_loss_backward")
def ctc_loss_backward(func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns the gradient of the log-probabilities, cut as they are."""
    scores = args[1]
    gradient = func(*_whole(func, args), **kwargs)
    return scores.with_local(scores.share(gradient, scores.dim_cut)) if is_part(scores) else gradient


def _whole(func: Any, args: tuple) -> tuple:
    """Arguments, of which those that are cut along positions are gathered; in forward that is noted. Collective."""
    parts: list[Part] = parts_in(args)
    if any(not part.axis.positions for part in parts):
        raise Uncut(no_rule(func, parts))
    name = func._schema.name.partition("::")[2].strip("_")
    for part in parts if not name.endswith("_backward") else []:
        for tell in GATHERS:
            tell(f"what {name} reads", part if part.dim_cut else part.transpose(0, 1))
    return replaced(Part, lambda part: gathered(part) if is_part(part) else part, args)
