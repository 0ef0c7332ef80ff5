"""Losses whose sizes hang on values are traced by their shapes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise import Task
from shardwise.planner import simulate
from shardwise.trace.fake import Fake
from shardwise.trace.known_values import give, values

STEPS, SAMPLES, CLASSES = 12, 4, 6
TARGETS = torch.tensor([[1, 2, 3, 1, 1], [2, 2, 0, 0, 0], [3, 1, 2, 0, 0], [1, 0, 0, 0, 0]])
LENGTHS = torch.tensor([4, 2, 3, 1])


@pytest.mark.parametrize("as_numbers", [False, True])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("flat", [False, True])
def test_ctc_without_values_has_the_shapes_of_a_run(flat: bool, known: bool, as_numbers: bool) -> None:
    targets = torch.cat([row[:n] for row, n in zip(TARGETS, LENGTHS, strict=True)]) if flat else TARGETS
    scores, through = torch.randn(STEPS, SAMPLES, CLASSES).log_softmax(-1), torch.full((SAMPLES,), STEPS)
    _, alpha = torch._ctc_loss(scores, targets, through, LENGTHS)
    fake = Fake()
    with values(fake):
        shapeless = fake.from_tensor(scores).requires_grad_()
        of_batch = [fake.from_tensor(t) for t in (targets, through, LENGTHS)]
        if known:
            of_batch = [give(f, t) for f, t in zip(of_batch, (targets, through, LENGTHS), strict=True)]
        lengths = (through.tolist(), LENGTHS.tolist()) if as_numbers else of_batch[1:]
        made, kept = torch._ctc_loss(shapeless, of_batch[0], *lengths)
        made.sum().backward()
    assert made.shape == (SAMPLES,) and shapeless.grad is not None and shapeless.grad.shape == scores.shape
    longest = 4 if known or as_numbers else 3 if flat else 5  # 10 targets end to end, of 4 samples
    assert kept.shape == (*alpha.shape[:2], 2 * longest + 1)


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heard, self.said = nn.GRU(5, 8, batch_first=True), nn.Linear(8, CLASSES)

    def forward(self, sound: Tensor) -> Tensor:
        return self.said(self.heard(sound)[0]).log_softmax(-1)


def recorded(step: int) -> dict[str, Tensor]:
    sound = torch.randn(SAMPLES, STEPS, 5, generator=torch.Generator().manual_seed(step))
    return {"sound": sound, "targets": TARGETS, "through": torch.full((SAMPLES,), STEPS), "lengths": LENGTHS}


def heard_wrong(output: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    scores = output.transpose(0, 1)
    loss = F.ctc_loss(scores, batch["targets"], batch["through"], batch["lengths"], reduction="sum")
    return loss, len(output)


def test_a_task_of_speech_is_simulated() -> None:
    task = Task(model=Speech, batch=recorded, loss=heard_wrong, inputs=lambda b: ((b["sound"],), {}))
    forecast = simulate(task, "dp_replicate=2", "1x2 h100-sxm-80gb", global_batch=8)
    assert forecast.step_s > 0
