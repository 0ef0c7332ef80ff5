"""Fields cut into tiles over ranks: proofs of whole tasks, and what is refused."""

from __future__ import annotations

from typing import Any

import domain_tasks
import pytest
import torch

from shardwise import Domain, parallelize, verify
from shardwise.checkpoint.load import restore
from shardwise.checkpoint.save import Saver
from shardwise.errors import InputError
from shardwise.layout import Plan
from shardwise.mesh import build_mesh
from shardwise.part import plain
from shardwise.part.positions import Positions

GRIDS = ("domain=2", "domain=1x3", "domain=2x2", "domain=3x2")
CASES = (
    ("point_wise", "domain=3x2"), ("point_wise", "domain=3,zero=1,accumulate=2"), ("channels_last", "domain=1x3"),
    ("weighted", "domain=2,dp_replicate=2,accumulate=2"), ("weighted", "domain=1x2,tp=2,dp_shard=2,zero=2"),
    ("normed", "domain=1x2,dp_shard=2,zero=1"), ("normed", "domain=2,zero=2"), ("resnet", "domain=2x2,zero=3"),
    ("resnet", "domain=2,pp=2"), ("vit", "domain=2x2"), ("vit", "domain=2,tp=2"),
    ("rollout", "domain=2,zero=3,remat=full"), ("convnext", "domain=1x2"), ("unet_batch", "domain=2x2"),
    ("unet_group", "domain=1x3"), ("unet_3d", "domain=2x1x2"), ("swin", "domain=2"), ("fno", "domain=2"),
)  # fmt: skip
FLAT = [name for name in dict.fromkeys(name for name, _ in CASES) if name != "unet_3d"]


@pytest.mark.parametrize(("task", "plan"), CASES)
def test_tiles_equal_one_process(pool, task: str, plan: str) -> None:
    found = verify(f"domain_tasks:{task}", plan, pool=pool)
    assert found.parity, found.text()
    assert "cuts the field of x" in found.text()


@pytest.mark.long
@pytest.mark.parametrize("plan", GRIDS)
@pytest.mark.parametrize("task", FLAT)
def test_every_task_on_every_grid_equals_one_process(pool, task: str, plan: str) -> None:
    found = verify(f"domain_tasks:{task}", plan, pool=pool, steps=3)
    if task == "fno" and plan in GRIDS[2:]:  # three modes along each dim, whose products view both dims as one
        assert "joins dims that are cut over domain0 and domain1" in found.refused, found.text()
        return
    assert found.parity, found.text()


@pytest.mark.parametrize(
    ("task", "plan", "reason"),
    [
        ("domain_tasks:sorted_rows", "domain=1x2", "fields of 11 x 13 cannot be cut: aten.sort"),
        ("domain_tasks:flattened", "domain=2x2", "no tensor has 2 of them behind batch and channel"),
        ("domain_tasks:channels_last", "domain=1x2x2", "Task.spatial names 2: lat"),
        ("domain_tasks:point_wise", "domain=12", "11 positions of a field over domain0=12 leave some rank with 0"),
    ],
)
def test_what_cannot_be_tiled_is_refused(pool, task: str, plan: str, reason: str) -> None:
    found = verify(task, plan, pool=pool)
    assert not found.parity and reason in found.refused, found.text()


def test_a_shrunk_proof_keeps_uneven_tiles_and_one_inside(pool) -> None:
    found = verify("domain_tasks:weighted", "domain=1x6,dp_replicate=8", shrink=True, pool=pool)  # 13 columns
    assert found.parity and found.proven == "dp_replicate=2,domain=1x3", found.text()
    assert "covered: dp_replicate=2, domain=1x3. Not covered: cuts that only dp_replicate=8 makes" in found.text()


def _run(plan: str, folder: str, first: int) -> tuple[list[float], tuple[float, float], Any]:
    """Losses of the steps up to the fourth, the second of which is saved or gone on from; then an evaluation and
    outputs.
    """
    engine = parallelize(domain_tasks.normed(), f"{plan},precision=fp64", randomness="global")
    make, losses = domain_tasks.normed().batch, []
    saver = Saver(engine, folder)
    if first:
        restore(engine, folder)
    for step in range(first, 4):
        losses.append(engine.step(make(step)).loss)
        if step == 1:
            saver.save({})
    saver.finish()
    saver.close()
    found = engine.evaluate([make(7), make(8)]), next(iter(engine.predict([make(9)])))
    engine.close()
    return losses, *found


def test_runs_on_tiles_are_gone_on_from_on_others(pool, tmp_path) -> None:
    alone = pool.run(_run, 1, "accumulate=1", str(tmp_path / "alone"), 0)[0]
    tiles = pool.run(_run, 4, "domain=2x2,zero=1", str(tmp_path / "tiles"), 0)
    others = pool.run(_run, 3, "domain=1x3", str(tmp_path / "tiles"), 2)
    for (losses, evaluated, _), steps in ((tiles[0], slice(0, 4)), (tiles[3], slice(0, 4)), (others[1], slice(2, 4))):
        assert losses == pytest.approx(alone[0][steps], rel=1e-12)
        assert evaluated == pytest.approx(alone[1], rel=1e-12)
    for first in (tiles[0], others[0]):
        torch.testing.assert_close(first[2], alone[2], rtol=1e-12, atol=1e-12)
    assert all(outputs is None for _, _, outputs in (*tiles[1:], *others[1:]))


def _draws() -> tuple[torch.Tensor, float]:
    """Dropout of a tiled tensor of ones in fast mode, and what the default generator gives after it."""
    mesh = build_mesh(Plan(domain=(2, 2)), torch.device("cpu"))
    torch.manual_seed(3)
    rows, columns = mesh.inner
    tiled = Positions((((2, (rows,)), (3, (columns,))),)).cut(torch.ones(1, 1, 31, 40))
    return plain(torch.nn.functional.dropout(tiled, 0.5)), float(torch.rand(1))


def test_tiles_draw_their_own_masks(pool) -> None:
    (whole, after), *others = pool.run(_draws, 4)
    assert all(torch.equal(whole, other) and after == theirs for other, theirs in others)
    assert 0.4 < float((whole > 0).double().mean()) < 0.6
    assert not torch.equal(whole[..., :15, :20], whole[..., 16:, 20:])  # each tile has a mask of its own


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: Domain(dims=(0, 1)), "dims behind the samples"),
        (lambda: Domain(dims=(-2, -1), names=("lat",)), "names each of 2 dims"),
        (lambda: Domain(dims=(-1,), names=("lon",), boundary={"lat": "zeros"}), "no dim is called 'lat'"),
        (lambda: Domain(dims=(-1,), names=("lon",), boundary={"lon": "periodic"}), "padding_mode='circular'"),
    ],
)
def test_bad_domains_are_named(made, message: str) -> None:
    with pytest.raises(InputError, match=message):
        made()
