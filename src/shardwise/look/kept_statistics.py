"""Which buffers a forward leaves otherwise for parts of a batch, and the problem where ranks cannot join them."""

from __future__ import annotations

import torch

Values = dict[str, torch.Tensor]  # by name


def differing(first: Values, second: Values) -> list[str]:
    """Returns the names under which both have a tensor of one shape, of other values.

    NaN is what a stage of a pipeline makes of what it was not sent.
    """
    return [
        name
        for name, value in first.items()
        if name in second and value.shape == second[name].shape and not torch.equal(value, second[name])
        if not (value.isnan() & second[name].isnan()).all()
    ]


def statistics_differ(names: list[str]) -> list[str]:
    """Returns [the problem] of buffers of these names, which no sum or mean over ranks would join; [] of none."""
    listed = ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return names and [
        f"{listed} {'is' if len(names) == 1 else 'are'} computed from the samples of a micro-batch, by other means "
        'than batch norm, so ranks would each keep statistics of their own: loss_scope="model" (of Task, of prepare) '
        "has every rank run the model on all samples"
    ]
