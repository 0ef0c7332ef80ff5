"""Find buffers that differ after forwards on parts of a batch, and batch norms over groups of a batch's samples."""

from __future__ import annotations

import torch
from torch import nn

Values = dict[str, torch.Tensor]  # name of a buffer -> its value after a forward


def differing(first: Values, second: Values) -> list[str]:
    """Returns the names under which both have a tensor of the same shape but of other values.

    Two tensors of NaN alone count as equal, since a pipeline stage has such for what it was not sent.
    """
    return [
        name
        for name, value in first.items()
        if name in second and value.shape == second[name].shape and not torch.equal(value, second[name])
        if not (value.isnan() & second[name].isnan()).all()
    ]


def statistics_differ(names: list[str]) -> list[str]:
    """Returns [the problem] of buffers of these names, which no sum or mean over ranks joins; [] without names."""
    listed = ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return names and [
        f"{listed} {'is' if len(names) == 1 else 'are'} computed from the samples of a micro-batch, by other means "
        'than batch norm, so ranks would each keep statistics of their own: loss_scope="model" (of Task, of prepare) '
        "has every rank run the model on all samples"
    ]


def norms_differ(*runs: list[tuple[nn.Module | None, int]]) -> tuple[list[str], list[nn.Module]]:
    """Returns ([the problem], norms) of batch norms that are not taken over all of a batch; ([], []) if none are.

    runs  of the whole and of two parts: (norm, how many values of a channel it got) of each call, in order
    """
    apart = []
    for norm in dict.fromkeys(norm for run in runs for norm, _ in run):
        whole, first, second = ([rows for caller, rows in run if caller is norm] for run in runs)
        # n == a == b: as many values for any number of samples, so the norm is not taken over samples
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
