"""Forecasts of plans that cut fields into tiles: memory and bytes beside real ranks, links, and a search."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_traced import HERE, beyond, check_wire
from torch import nn

from shardwise import Task
from shardwise.cluster import Cluster
from shardwise.costs.layout import of_plan
from shardwise.costs.software import software
from shardwise.costs.wire import RankGroup, Wire
from shardwise.errors import RefusedPlan
from shardwise.layout import Plan
from shardwise.planner import Constraints, simulate
from shardwise.planner import search as search_plans
from shardwise.planner.candidates import tile_grids
from shardwise.planner.traced_layouts import traced_subject
from shardwise.planner.traced_task import Traced

LONG = pytest.mark.long
GRIDS = ["domain=2", "domain=1x3", "domain=2x2", "domain=3x2"]
BESIDE = ["", ",zero=1", ",zero=2,accumulate=2", ",zero=3", ",zero=3,accumulate=2", ",remat=full", ",remat=selective"]
COMPOSED = ["domain=2,dp_replicate=2", "domain=2,dp_shard=2,zero=1", "domain=2,dp_shard=2,zero=3,remat=full",
            "domain=2,dp_replicate=2,accumulate=2", "domain=2,tp=2", "domain=2,pp=2"]  # fmt: skip
ALL = [*([grid + more for more in BESIDE] for grid in GRIDS), COMPOSED]


@pytest.mark.parametrize(
    ("name", "plans"),
    [
        pytest.param("unet_batch", ["domain=1x2,zero=1,domain_overlap=always"], id="unet"),
        pytest.param("unet_group", ["domain=2,dp_shard=2,zero=3,remat=full"], id="unet-zero3", marks=LONG),
        pytest.param("resnet", ["domain=2,dp_replicate=2,accumulate=2", "domain=2,pp=2"], id="resnet", marks=LONG),
        pytest.param("vit", ["domain=2,zero=2,accumulate=2"], id="vit"),
        pytest.param("vit", ["domain=1x2,tp=2"], id="vit-tp", marks=LONG),
        *(
            pytest.param(name, plans, id=f"{name}-{plans[0]}-all", marks=LONG)
            for name in ("unet_batch", "unet_group", "resnet", "vit")
            for plans in ALL
        ),
        *(
            pytest.param(name, [*GRIDS[:3], *COMPOSED[:2]], id=f"{name}-grids", marks=LONG)
            for name in ("swin", "rollout", "weighted")
        ),
        pytest.param("unet_3d", ["domain=2x1x2", "domain=1x2,zero=3"], id="unet_3d", marks=LONG),
        pytest.param("fno", ["domain=2", "domain=1x3"], id="fno", marks=LONG),
    ],
)
def test_memory_of_every_tile_is_within_two_percent(name: str, plans: list[str], pool) -> None:
    """Uneven tiles, alone and beside other axes: each rank's forecast against the peak of its live bytes."""
    wrong = beyond(pool, f"domain_tasks:{name}", plans)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("unet_batch", "domain=2x2,domain_overlap=always"),
        ("vit", "domain=2,dp_replicate=2"),
        ("plain_stack", "domain=2x2,domain_depth=4"),
        ("resnet", "domain=1x2,dp_replicate=2,accumulate=2"),
    ],  # of one axis alone, the ledger would name its group by another axis that has the same ranks
)
def test_bytes_between_tiles_are_those_of_the_ledger(name: str, text: str, pool) -> None:
    """Halos, sums of norms and the loss: calls and bytes of each rank, axis and operation."""
    check_wire(pool, f"domain_tasks:{name}", text)


def _stack(rows: int, columns: int, channels: int, radius: int) -> Task:
    def model() -> nn.Module:
        wide = 2 * radius + 1
        return nn.Sequential(*(nn.Conv2d(channels, channels, wide, padding=radius) for _ in range(2)))

    def batch(step: int) -> dict:
        return {"x": torch.zeros(2, channels, rows, columns)}

    return Task(model=model, batch=batch, inputs=lambda batch: ((batch["x"],), {}), name="stack",
                loss=lambda output, batch: (output.square().sum(), float(len(output))))  # fmt: skip


def test_halos_of_a_tile_inside_are_those_of_the_formula() -> None:
    """B C s (2 r b + 2 r a + 4 r^2) forward for each convolution; the same back, but not for the input of the first."""
    channels, radius, a, b = 3, 2, 7, 5
    task, plan = _stack(3 * a, 3 * b, channels, radius), Plan(domain=(3, 3))
    traced = Traced(task, HERE, software("shardwise"), "fp32", (2, 2), cuts=True)
    key, sizes, beside = traced._key(of_plan(plan, global_batch=2, seq=1), 2)
    (model,) = traced.ranks(key, sizes, beside, (1, 1))
    one = 2 * channels * 4 * (2 * radius * b + 2 * radius * a + 4 * radius**2)
    came = {kind: sum(part.values()) for (kind, _), part in model.small.arrivals.items()}
    assert came == {"F": 2 * one, "B": one}


def test_a_deep_halo_is_one_exchange_of_as_many_bytes() -> None:
    """Of two convolutions; the corners of the first one's outputs more."""
    channels, radius, a, b = 3, 2, 7, 5
    task = _stack(3 * a, 3 * b, channels, radius)
    traced = Traced(task, HERE, software("shardwise"), "fp32", (2, 2), cuts=True)
    calls, sent = {}, {}
    for depth in (1, 2):
        key, sizes, beside = traced._key(of_plan(Plan(domain=(3, 3), domain_depth=depth), global_batch=2, seq=1), 2)
        (model,) = traced.ranks(key, sizes, beside, (1, 1))
        calls[depth] = sum(n for (_, op, _), n in model.small.wire["F", 0].items() if op == "all_to_all")
        sent[depth] = sum(model.small.arrivals["F", 0].values())
    assert calls == {1: 4, 2: 2}
    strips = 2 * channels * 4 * 2 * (2 * radius * (a + b))
    assert sent == {
        1: strips + 2 * 2 * channels * 4 * 4 * radius**2,
        2: strips + 2 * channels * 4 * 4 * (2 * radius) ** 2,
    }


def test_halos_go_over_the_links_between_the_tiles() -> None:
    """Of 8 tiles in a row on two nodes of 4, two have one neighbour each on the other node."""
    cluster = Cluster.parse("2x4 h100-sxm-80gb, ib-400")
    wire, came = Wire(cluster), {-1: 6e6, 1: 4e6}
    assert wire.by_tier(came, RankGroup(8)) == {0: 4e6, 1: 6e6}, (
        "the fifth waits for the fourth, its other side is near"
    )
    assert wire.by_tier(came, RankGroup(4)) == {0: 10e6}
    assert wire.by_tier(came, RankGroup(2, 4)) == {1: 6e6}, "one of each node; each has one neighbour"
    far, near = cluster.tiers[1], cluster.tiers[0]
    assert near.gbps.value > far.gbps.value
    assert wire.exchange(came, RankGroup(8), 1) == pytest.approx(6e6 / (far.gbps.value * 1e9), rel=0.3)
    assert (
        wire.exchange(came, RankGroup(8), 10)
        > wire.exchange(came, RankGroup(8), 1)
        > 2 * wire.exchange(came, RankGroup(4), 1)
    )


def test_a_halo_that_was_measured_is_taken_as_measured() -> None:
    """Of neighbours alone; what comes from farther away, or between two ranks, is an all-to-all."""
    rows = (("all_to_all", 2, 1024, 30.0), ("all_to_all", 4, 1024, 90.0), ("halo", 4, 1024, 50.0))
    wire = Wire(replace(Cluster.parse("1x4 h100-sxm-80gb"), collectives=rows))
    assert wire.exchange({-1: 512.0, 1: 512.0}, RankGroup(4), 3) == pytest.approx(150e-6)
    assert wire.exchange({-1: 256.0, 1: 256.0, 2: 256.0}, RankGroup(4), 1) == pytest.approx(90e-6)
    assert wire.exchange({1: 512.0}, RankGroup(2), 1) == pytest.approx(30e-6)


def test_halos_beside_convolutions_cost_what_is_left_of_them() -> None:
    """Over a slow link; on the cores of one host nothing hides. The bytes are the same."""
    task = replace(_forecaster(361, 720), model=_convolutions)

    def of_tiles(overlap: str, cluster: str) -> tuple[float, float]:
        forecast = simulate(task, f"domain=2,domain_overlap={overlap}", cluster, global_batch=1)
        return forecast.parts["communication between tiles"], sum(forecast.halos.values())

    waited, sent = of_tiles("never", "2x1 l40s, eth-10")
    some, same = of_tiles("auto", "2x1 l40s, eth-10")
    all_, bytes_ = of_tiles("always", "2x1 l40s, eth-10")
    assert all_ < some < waited and sent == pytest.approx(same) == pytest.approx(bytes_)
    on_cores = [simulate(task, f"domain=2,domain_overlap={word}", HERE, global_batch=1) for word in ("never", "always")]
    halos = [forecast.parts["communication between tiles"] for forecast in on_cores]
    assert halos[1] == pytest.approx(halos[0])


def test_grids_with_short_borders_come_first() -> None:
    assert tile_grids(8, (721, 1440)) == [(1, 2), (2,), (2, 2), (1, 4), (2, 4), (1, 8)]
    assert tile_grids(6, (3, 4)) == [(1, 2), (2,), (1, 3), (3,), (2, 3), (3, 2)]
    assert tile_grids(5, (3, 4)) == []


# --- a search


def _forecaster(rows: int = 181, columns: int = 360) -> Task:
    """A small U-Net on a field, of which one sample is larger than its weights."""
    from domain_tasks import UNet

    class Fields:
        def __len__(self) -> int:
            return 64

        def read(self, indices: list[int]) -> dict:
            x = torch.zeros(len(indices), 3, rows, columns)
            return {"x": x, "y": x[:, :2]}

    return Task(model=lambda: UNet("group", 32), data=Fields(), inputs=lambda batch: ((batch["x"],), {}), name="fields",
                loss=lambda output, batch: ((output - batch["y"]).square().mean((1, 2, 3)).sum(), float(len(output))),
                optimizer=torch.optim.AdamW)  # fmt: skip


def _convolutions() -> nn.Module:
    """What a search goes through in a tenth of the time of a U-Net."""
    wide = nn.Conv2d(3, 32, 3, padding=1), nn.GELU(), nn.Conv2d(32, 32, 3, padding=1), nn.GELU()
    return nn.Sequential(*wide, nn.Conv2d(32, 2, 3, padding=1))


def _small(cluster: str, gigabytes: float) -> Cluster:
    """The cluster with as much memory on each device."""
    from dataclasses import replace

    found = Cluster.parse(cluster)
    memory = replace(found.device.memory_gb, value=gigabytes)
    return replace(found, device=replace(found.device, memory_gb=memory))


def test_a_sample_too_large_for_a_device_is_answered_by_tiles() -> None:
    """The wall is told, tiles are ranked first, and `simulate` says the same of the best plan as the search does."""
    task = replace(_forecaster(), model=_convolutions)
    machine = _small("1x4 l40s", 0.797)  # 0.7 of it lies outside the allocator
    subject = traced_subject(task, machine, software("shardwise"), 4, "fp32", ("none", "full"))
    found = search_plans(subject, machine, Constraints(most=(("tp", 1), ("pp", 1))), precision="fp32")
    assert all(p.layout.tiles > 1 for p in found.proposals)
    assert found.best.runnable == "" and found.best.forecast.halos.keys() == {machine.tiers[0].name}
    assert any("tiles (domain) answer a wall: one sample at a time needs 44.4 MB" in note for note in found.notes)
    assert "needs" in found.lost["DDP"] and "needs" in found.lost["ZeRO-3"]
    again = simulate(task, found.best.plan, machine, global_batch=4)
    assert again.step_s == pytest.approx(found.best.forecast.step_s, rel=0.02)
    assert again.worst.allocated == pytest.approx(found.best.forecast.worst.allocated, rel=0.02)
    assert again.parts["communication between tiles"] > 0


def test_a_grid_that_is_asked_for_is_looked_at() -> None:
    machine = Cluster.parse("1x4 a100-sxm-80gb")
    task = replace(_forecaster(45, 90), model=_convolutions)
    subject = traced_subject(task, machine, software("shardwise"), 4, "fp32", ("none",))
    asked = Constraints(fixed=(("domain", (2, 2)), ("zero", 1)))
    found = search_plans(subject, machine, asked, precision="fp32")
    assert {p.plan.domain for p in found.proposals} == {(2, 2)} and {p.plan.zero for p in found.proposals} == {1}
    assert not any("wall" in note for note in found.notes), "nothing stands against whole fields"
    without = search_plans(subject, machine, Constraints(fixed=(("zero", 1),)), precision="fp32")
    assert not any(p.layout.tiles > 1 for p in without.proposals)


def test_fewer_samples_than_devices_are_cut() -> None:
    machine = Cluster.parse("1x4 a100-sxm-80gb")
    task = replace(_forecaster(45, 90), model=_convolutions)
    subject = traced_subject(task, machine, software("shardwise"), 2, "fp32", ("none",))
    found = search_plans(subject, machine, Constraints(most=(("tp", 1), ("pp", 1))), precision="fp32")
    assert any("2 samples are fewer than 4 devices" in note for note in found.notes)
    assert any(p.layout.tiles > 1 and p.plan.world_size == 4 for p in found.proposals)


def test_halos_that_are_waited_for_are_exchanged_in_other_ways() -> None:
    """Of one sample on two devices with a slow link between them one exchange for several convolutions is faster."""
    machine = Cluster.parse("2x1 l40s, eth-10")
    task = replace(_forecaster(45, 90), model=_convolutions)
    subject = traced_subject(task, machine, software("shardwise"), 1, "fp32", ("none",))
    found = search_plans(subject, machine, Constraints(most=(("tp", 1), ("pp", 1))), precision="fp32")
    tiled = {(p.layout.domain_depth, p.layout.domain_overlap): p.forecast for p in found.proposals}
    assert {(1, "auto"), (1, "always"), (2, "auto"), (4, "auto")} <= tiled.keys(), tiled.keys()
    assert min(tiled[2, "auto"].step_s, tiled[4, "auto"].step_s) < tiled[1, "auto"].step_s


def test_memory_of_tiles_follows_their_number() -> None:
    """Of a U-Net: within 15% of its share. Backward puts windows together again, and norms are several kernels."""
    task = _forecaster(361, 720)
    peaks = {}
    for text in ("single", "domain=1x2", "domain=2x2"):
        plan = Plan.parse(text)
        peaks[plan.tiles] = simulate(task, plan, "4 h100-sxm-80gb", global_batch=1).worst.terms["micro-batch"]
    assert all(peaks[1] / n < peaks[n] < 1.15 * peaks[1] / n for n in (2, 4)), peaks


def test_a_decoder_by_its_numbers_has_no_tiles() -> None:
    with pytest.raises(RefusedPlan, match="domain cuts fields of space"):
        simulate("llama3-8b", "domain=2,precision=bf16", "2 h100-sxm-80gb", global_batch=2, seq=2048)
