"""What a search of one's own module looks at: both axes at once, dealt experts, and what it names and leaves out."""

from __future__ import annotations

import torch
from torch import nn

from shardwise import Task
from shardwise.cluster import Cluster
from shardwise.costs.software import software
from shardwise.layout import Plan
from shardwise.models import tasks
from shardwise.planner.candidates import Constraints
from shardwise.planner.door import layout_of
from shardwise.planner.propose import Subject
from shardwise.planner.traced import Traced, cut_layouts, data_layouts, expert_layouts, traced_subject

NODE = Cluster.parse("8 h100-sxm-80gb")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Tied(nn.Module):
    """The first block is given what the embedding gave, untouched: under tp a sum that nobody has taken yet."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(48, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.head = nn.Linear(16, 48, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _loss(output: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    return nn.functional.cross_entropy(output.flatten(0, 1), batch.flatten(), reduction="sum"), batch.numel()


def tied() -> Task:
    return Task(model=Tied, loss=_loss, batch=lambda step: torch.zeros(32, 6, dtype=torch.long), name="tied")


def subject(task: Task, batch: int) -> Subject:
    return traced_subject(task, NODE, software("shardwise"), batch, "fp32", ("none",))


def test_a_stage_may_begin_where_a_sum_of_tp_is_received() -> None:
    seen = subject(tied(), 32)
    for text in ("tp=2,pp=2,stages=blocks.0,microbatches=4", "tp=2,pp=4,stages=blocks.0|blocks.1|blocks.2"):
        assert seen.simulate(layout_of(Plan.parse(text), seen)).step_s > 0


def test_both_axes_come_after_each_alone_and_only_where_they_divide_the_ranks() -> None:
    found = [(each.tp, each.pp) for each in cut_layouts(8, 32, 8, ["none"], Constraints())]
    both = [tp > 1 and pp > 1 for tp, pp in found]
    assert any(both) and both == sorted(both)
    assert {8 % (tp * pp) for tp, pp in found} == {0}
    asked = cut_layouts(8, 32, 8, ["none"], Constraints(fixed=(("tp", 2), ("pp", 4))))
    assert {(each.tp, each.pp) for each in asked} == {(2, 4)}


def test_experts_are_dealt_inside_a_node_and_over_ranks_that_shard() -> None:
    base = list(data_layouts(8, 32, 4, ["none"]))
    assert {each.ep for each in expert_layouts(base, 4, Constraints())} == {2, 4}
    assert all(each.shard % each.ep == 0 for each in expert_layouts(base, 4, Constraints()))
    assert {each.ep for each in expert_layouts(base, 8, Constraints(fixed=(("ep", 2),)))} == {2}


def test_a_search_of_routed_experts_looks_at_dealt_ones() -> None:
    two = Cluster.parse("2 h100-sxm-80gb")
    seen = traced_subject(tasks.moe(), two, software("shardwise"), 8, "fp32", ("none",))
    assert not Traced(tied(), two, software("shardwise"), "fp32", (1, 2), True).routed
    dealt = [each for each in seen.layouts(2, Constraints(fixed=(("ep", 2), ("zero", 1)))) if each.ep == 2]
    assert dealt
    assert min(seen.simulate(each).step_s for each in dealt) > 0
