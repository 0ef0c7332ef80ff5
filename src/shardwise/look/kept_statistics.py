"""Which buffers a forward leaves otherwise for parts of a batch, and which batch norms are taken over other samples."""

from __future__ import annotations

import torch
from torch import nn

Values = dict[str, torch.Tensor]  # by name


def differing(first: Values, second: Values) -> list[str]:
    """Returns the names under which both have a tensor of one shape, of other values.

    Two of NaN alone do not differ: a stage of a pipeline makes these of what it was not sent.
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


def norms_differ(*runs: list[tuple[nn.Module | None, int]]) -> tuple[list[str], list[nn.Module]]:
    """Returns ([the problem], norms) of batch norms over other samples than the batch's: of ghost batches, of a few.

    runs  of the whole and of two parts: (norm, how many values of a channel it was given) of each call
    """
    apart = []
    for norm in dict.fromkeys(norm for run in runs for norm, _ in run):
        whole, first, second = ([rows for caller, rows in run if caller is norm] for run in runs)
        # n == a == b: as many for any number of samples, so they are not what is normalised over
        same_calls = len(whole) == len(first) == len(second)
        if not same_calls or any(
            n not in (a + b, a) or (n == a != b) for n, a, b in zip(whole, first, second, strict=True)
        ):
            apart.append(norm)
    if not apart:
        return [], []
    of_whole, *of_parts = ([rows for _, rows in run] for run in runs)
    problem = (
        f"batch norms get {_few(of_whole)} values of a channel on some samples, and "
        f"{' and '.join(map(_few, of_parts))} on two parts of them: they are taken over groups "
        "of samples within a batch (ghost batches), which ranks would "
        'group otherwise: loss_scope="model" (of Task, of prepare) has every rank run the model on all samples'
    )
    return [problem], [norm for norm in apart if norm is not None]


def _few(rows: list[int]) -> str:
    return ", ".join(map(str, rows[:4])) + (f" (and {len(rows) - 4} more)" if len(rows) > 4 else "") or "no"
