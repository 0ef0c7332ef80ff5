"""Fields cut into tiles over ranks: proofs of whole tasks, and what is refused."""

from __future__ import annotations

from typing import Any

import domain_tasks
import numpy as np
import pytest
import torch
import zarr
from mutations.plant import Bug, planted

from shardwise import Domain, Task, parallelize, verify
from shardwise.checkpoint.load import restore
from shardwise.checkpoint.save import Saver
from shardwise.comm import Axis
from shardwise.data import ArraySource, Loader, own_tile, predict_to
from shardwise.engine.find_positions import find_positions
from shardwise.errors import InputError, RefusedPlan
from shardwise.layout import Plan
from shardwise.layout.grid import SPACE
from shardwise.memory.live import LiveBytes
from shardwise.mesh import build_mesh
from shardwise.part import Uncut, plain
from shardwise.part.positions import Positions
from shardwise.part.rules import norms
from shardwise.precision import Precision
from shardwise.proof.shrink import shrink
from shardwise.trace.deferred import build

GRIDS = ("domain=2", "domain=1x3", "domain=2x2", "domain=3x2")
# each task on few ranks; every one on every grid is proven in `long`
CASES = (
    ("point_wise", "domain=3x2"), ("point_wise", "domain=3,zero=1,accumulate=2"), ("channels_last", "domain=1x3"),
    ("weighted", "domain=2,dp_replicate=2,accumulate=2"), ("weighted", "domain=1x2,tp=2,dp_shard=2,zero=2"),
    ("normed", "domain=1x2,dp_shard=2,zero=1"), ("normed", "domain=2,zero=2"),
    ("resnet", "domain=2x2,zero=3,domain_overlap=always"), ("resnet", "domain=2,pp=2"), ("vit", "domain=2"),
    ("vit", "domain=2,tp=2"), ("cut_batch_norm", "domain=2,tp=2"),
    ("rollout", "domain=2,zero=3,remat=full,domain_overlap=always"), ("convnext", "domain=1x2"),
    ("unet_group", "domain=1x3,domain_overlap=always"),
    ("unet_group", "domain=2x2,remat=selective,domain_overlap=always"), ("unet_3d", "domain=2x1x2"),
    ("swin", "domain=2"), ("fno", "domain=2"), ("fno", "domain=1x2,tp=2"), ("warped", "domain=2x2"),
    ("aligned", "domain=1x3"), ("segformer", "domain=2x2"), ("scaled_row", "domain=2"), ("of_pairs", "domain=2"),
    ("sphere", "domain=2x2"), ("on_land", "domain=1x3"), ("singular_whole", "domain=2"),
    ("sorted_rows", "domain=1x3"), ("instances", "domain=2"),
    ("plain_stack", "domain=2x2,domain_depth=4"), ("plain_stack", "domain=1x3,domain_depth=2,zero=3,remat=full"),
    ("on_land", "domain=2x2,dp_shard=2,zero=3"), ("interpolated", "domain=2x2"), ("axial", "domain=2x2"),
    ("mesh_edges", "domain=2"), ("pyramid", "domain=2x2"), ("bounded", "domain=2x2"), ("frames", "domain=2x2"),
    ("patchwise", "domain=2x2"), ("forces", "domain=2"), ("columns", "domain=2"), ("scanned", "domain=2"),
)  # fmt: skip
# in `long` alone: batch norm on a grid is resnet's above, stages of tiles likewise
REST = (
    ("unet_batch", "domain=2x2"), ("vit", "domain=2,pp=2"), ("pyramid", "domain=2"), ("fno", "domain=2x2,tp=2"),
    ("spectra", "domain=2x2"),
)  # fmt: skip
FLAT = [name for name in dict.fromkeys(name for name, _ in CASES + REST) if name != "unet_3d"]


@pytest.mark.parametrize(("task", "plan"), [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in REST)])
def test_tiles_equal_one_process(pool, task: str, plan: str) -> None:
    found = verify(f"domain_tasks:{task}", plan, pool=pool)
    assert found.parity, found.text()
    assert "cuts the field of x" in found.text()


@pytest.mark.long
@pytest.mark.parametrize("plan", GRIDS)
@pytest.mark.parametrize("task", FLAT)
def test_every_task_on_every_grid_equals_one_process(pool, task: str, plan: str) -> None:
    found = verify(f"domain_tasks:{task}", plan, pool=pool, steps=3)
    assert found.parity, found.text()


def elsewhere() -> Task:
    """A task whose dims of space are not those of its fields."""
    return domain_tasks.weighted().with_(spatial=Domain((4, 5), ("row", "col")))


@pytest.mark.parametrize(
    ("task", "plan", "reason"),
    [
        ("domain_tasks:levels", "domain=1x2", "fields of 11 x 13 cannot be cut: aten._unique2"),
        ("domain_tasks:flattened", "domain=2x2", "no tensor has 2 dim(s) of space behind batch and channel"),
        ("domain_tasks:channels_last", "domain=1x2x2", "Task.spatial names 2: lat"),
        ("test_domain:elsewhere", "domain=2", "names row (4), col (5), and no tensor of the batch has these"),
        ("domain_tasks:forces_apart", "domain=2,pp=2", "takes itself (torch.autograd.grad) of what other pipeline"),
        ("domain_tasks:point_wise", "domain=12", "11 positions of a field over domain0=12 leave some rank with 0"),
    ],
)
def test_what_cannot_be_tiled_is_refused(pool, task: str, plan: str, reason: str) -> None:
    found = verify(task, plan, pool=pool)
    assert not found.parity and reason in found.refused, found.text()
    if "levels" in task:
        assert "domain_tasks.py:" in found.refused and "shardwise.whole(x) gathers it" in found.refused


def unnamed() -> Task:
    """Fields (B, H, W, C) whose dims of space the task does not name."""
    return domain_tasks.channels_last().with_(spatial=None)


def test_dims_of_space_before_the_channels_are_found(pool) -> None:
    found = verify("test_domain:unnamed", "domain=1x4", pool=pool)  # four ranks for three channels
    assert found.parity and "cuts the field of x and y along dim 2" in found.text(), found.text()


def growing() -> Task:
    """Fields of other extents in each step; targets have a column less, and so are whole on every rank."""

    def batch(step: int) -> dict[str, torch.Tensor]:
        draws, rows = torch.Generator().manual_seed(step), 9 - 2 * step
        return {"x": torch.randn(2, 3, rows, 12, generator=draws), "y": torch.randn(2, 2, rows, 11, generator=draws)}

    def loss(output: torch.Tensor, batch: dict) -> tuple:
        return (output[..., :-1] - batch["y"]).square().mean((1, 2, 3)).sum(), float(len(output))

    return domain_tasks.point_wise().with_(batch=batch, loss=loss)


def test_extents_may_differ_from_step_to_step_and_between_tensors(pool) -> None:
    found = verify("test_domain:growing", "domain=2", steps=3, pool=pool)
    assert found.parity and "cuts the field of x along dim 2" in found.text(), found.text()


def test_a_kernel_wider_than_the_periodic_field_is_named_with_its_field(pool) -> None:
    with pytest.raises(InputError, match=r"one process too: .*This is Conv2d\(3, 2, .*given \(4, 3, 11, 13\)"):
        verify("domain_tasks:wrapped_twice", "domain=2", pool=pool)


def _refused_where_one_tile_differs(what: str) -> str:
    """What is said where the tile in the middle cannot be computed, or comes to another collective."""
    real = norms._total

    def total(tensor: torch.Tensor, axes: tuple) -> torch.Tensor:
        if axes[0].index == 1:
            if what == "cannot":
                raise Uncut("planted")
            real(tensor, axes)
        return real(tensor, axes)

    norms._total = total
    try:
        parallelize(domain_tasks.normed(), "domain=3", check_loss=False).close()
    except RefusedPlan as refused:
        return str(refused)
    finally:
        norms._total = real
    return "nothing"


@pytest.mark.parametrize(("what", "said"), [("cannot", "the share of rank 1 cannot"), ("meets", "ranks 0 and 1 would")])
def test_a_tile_that_goes_another_way_is_refused_on_all_ranks(pool, what: str, said: str) -> None:
    told = pool.run(_refused_where_one_tile_differs, 3, what)
    assert len(set(told)) == 1 and said in told[0], told


def test_a_shrunk_proof_keeps_uneven_tiles_and_one_inside(pool) -> None:
    found = verify("domain_tasks:weighted", "domain=1x6,dp_replicate=2", shrink=True, pool=pool)  # 13 columns
    assert found.parity and found.proven == "dp_replicate=2,domain=1x3", found.text()
    assert "covered: dp_replicate=2, domain=1x3. Not covered: cuts that only domain=1x6 makes" in found.text()


def test_a_shrunk_proof_has_a_small_field(pool) -> None:
    """Of 181 x 360 cells over 4 tiles: odd rows, even columns, as many as five halvings need; a module of one size."""
    found = verify("domain_tasks:unet_degree_group", "domain=1x4", shrink=True, pool=pool)
    assert found.parity and found.proven == "domain=1x3", found.text()
    assert "fields of 181 x 360 -> 53 x 168 cells" in found.text()
    assert "Not covered: cuts that only domain=1x4 makes, fields of 181 x 360" in found.text()
    fixed = shrink(domain_tasks.large_vit, domain_tasks.large_vit(), Plan.parse("domain=2"))
    assert any("the field was kept" in note for note in fixed.notes), fixed.notes


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


def _curve(name: str, plan: str, precision: str = "fp64", steps: int = 20, moved: int | None = None) -> list[float]:
    """Losses of so many steps; `moved`: of fields moved up or down by a rounding of bfloat16, drawn by this seed."""
    task = getattr(domain_tasks, name)()
    engine = parallelize(task, f"{plan},precision={precision}", randomness="global", check_loss=False)
    losses = []
    for step in range(steps):
        batch = task.batch(step)
        if moved is not None:
            draws = torch.Generator().manual_seed(1000 * moved + step)
            signs = torch.randint(-1, 2, batch["x"].shape, generator=draws)
            batch["x"] = batch["x"] * (1 + signs * torch.finfo(torch.bfloat16).eps / 2)
        losses.append(engine.step(batch).loss)
    engine.close()
    return losses


@pytest.mark.parametrize(
    ("name", "grids"),
    [("normed", ["domain=2", "domain=3x2"]),
     pytest.param("unet_batch", ["domain=2", "domain=1x2", "domain=2x2", "domain=3x2"], marks=pytest.mark.long),
     pytest.param("fno", ["domain=2", "domain=1x2", "domain=2x2", "domain=3x2"], marks=pytest.mark.long),
     pytest.param("swin", ["domain=2", "domain=1x2", "domain=2x2"], marks=pytest.mark.long)],
)  # fmt: skip
def test_loss_curves_of_all_grids_agree(pool, name: str, grids: list[str]) -> None:
    (alone,) = pool.run(_curve, 1, name, "accumulate=1")
    assert max(alone) - min(alone) > 1e-3
    for grid in grids:
        curves = pool.run(_curve, Plan.parse(grid).world_size, name, grid, timeout_s=300)
        assert all(curve == curves[0] for curve in curves)
        assert curves[0] == pytest.approx(alone, rel=1e-11)


@pytest.mark.long
@pytest.mark.parametrize("name", ["unet_group", "unet_batch"])
def test_bf16_on_tiles_stays_near_fp32_and_one_process(pool, name: str) -> None:
    """Plans differ less than one process from itself where its inputs are rounded otherwise: 0.40% of 0.70%."""

    def curve(*of: Any) -> torch.Tensor:
        return torch.tensor(pool.run(_curve, Plan.parse(of[0]).world_size, name, *of)[0], dtype=torch.float64)

    def apart(one: torch.Tensor, other: torch.Tensor) -> float:
        return float(((one - other) / fp32[0]).abs().max())

    fp32, alone = (curve("accumulate=1", precision, 10) for precision in ("fp32", "bf16"))
    bar = max(apart(curve("accumulate=1", "bf16", 10, seed), alone) for seed in range(4))
    assert float((fp32 - fp32[0]).abs().max()) > 1e-3 and 1e-4 < bar < 0.01
    for plan in ("dp_replicate=2", "domain=2", "domain=1x2,zero=3"):
        found = curve(plan, "bf16", 10)
        assert float(((found - fp32) / fp32).abs().max()) < 0.02
        assert apart(found, alone) < bar, (plan, apart(found, alone), bar)


def _peak_of_a_tile(plan: str) -> int:
    """Live bytes at the peak of a step of a U-Net, above what lies there before it but for the tile of the batch."""
    fields = {"x": np.ones((1, 3, 120, 160), "f"), "y": np.ones((1, 2, 120, 160), "f")}
    source = ArraySource(fields, global_shape=(120, 160))
    task = domain_tasks._task(lambda: domain_tasks.UNet("group", 16), None, data=source)
    engine = parallelize(task, plan, check_loss=False)
    mine: Any = own_tile(source, engine)
    engine.step(mine.read([0]))
    with LiveBytes() as live:
        engine.step(mine.read([0]))
    engine.close()
    return live.peak


def test_each_rank_may_give_a_step_its_own_tile(pool) -> None:
    assert len(pool.run(_peak_of_a_tile, 2, "domain=2")) == 2


@pytest.mark.long
def test_a_rank_holds_its_share_of_a_u_net_and_little_more(pool) -> None:
    """Within 15%: the halo, and what each rank has of weights and gradients."""
    whole = pool.run(_peak_of_a_tile, 1, "accumulate=1")[0]
    for plan in ("domain=2", "domain=1x3", "domain=2x2"):
        ranks = Plan.parse(plan).world_size
        peaks = pool.run(_peak_of_a_tile, ranks, plan)
        assert max(peaks) <= 1.15 * whole / ranks, (plan, whole, peaks)


def test_a_spectrum_that_is_written_into_zeros_is_not_gathered() -> None:
    """Rehearsed on 2 x 2 tiles: zeros of the whole field become a tile when the lowest modes are written there."""
    task, plan = domain_tasks.fno(), Plan(domain=(2, 2))
    axes = tuple(Axis(name, 2, 0, None, (0, 1)) for name in SPACE[:2])
    found = find_positions(task, plan, axes, Precision.of(plan), build(task.model, 0), task.batch(0))
    assert found.routes == (), found.routes


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
        (lambda: Domain(dims=(-2, -1), names=("lat", "lat")), "names each of 2 dims"),
        (lambda: Domain(dims=(-1,), names=("lon",), boundary={"lat": "zeros"}), "no dim is called 'lat'"),
        (lambda: Domain(dims=(-1,), names=("lon",), boundary={"lon": "round"}), "lon='round' is none of zeros"),
        (lambda: Domain(dims=(-1,), names=("lon",), boundary={"lon": "pole"}), "one other dim that is 'periodic'"),
        (lambda: Domain(dims=(1, -1), names=("a", "b"), boundary={"b": "reflect"}), "count all dims from the front"),
    ],
)
def test_bad_domains_are_named(made, message: str) -> None:
    with pytest.raises(InputError, match=message):
        made()


def _from_files(
    folder: str, plan: str, kind: type = domain_tasks.Reading, dims: tuple[int, ...] = (-2, -1)
) -> tuple[list[float], Any, set]:  # fmt: skip
    """Losses of three steps read by a loader, the outputs of a last batch, and the extents that were read."""
    task = domain_tasks.from_files(folder, kind, Domain(dims))
    engine = parallelize(task, f"{plan},precision=fp64")
    source: Any = task.data
    source.seen = set()
    mine = own_tile(source, engine)
    with Loader(mine, 3, 4, data_rank=engine.data_rank, data_ranks=engine.data_ranks, prefetch=0) as loader:
        losses = [engine.step(next(loader)).loss for _ in range(3)]
    seen = source.seen
    for suffix in ("npy", "zarr"):
        predict_to(engine, source, f"{folder}/{plan}.{suffix}", batch_size=4)
    found = next(iter(engine.predict([source.read([0, 5])])))  # whole fields are taken too
    engine.close()
    return losses, found, seen


def _write_fields(folder: Any) -> None:
    draws = np.random.default_rng(0)
    shape = (9, 3, domain_tasks.ROWS, domain_tasks.COLUMNS)
    fields = {"x": draws.normal(size=shape), "y": draws.normal(size=shape)[:, :2], "scale": draws.uniform(size=9)}
    for name, field in fields.items():
        np.save(folder / f"{name}.npy", field)


@pytest.mark.parametrize("plan", ["domain=2x2", pytest.param("domain=1x2,dp_shard=2,zero=2", marks=pytest.mark.long)])
def test_a_rank_reads_its_own_tile_alone(pool, tmp_path, plan: str) -> None:
    _write_fields(tmp_path)
    (losses, outputs, whole), *_ = pool.run(_from_files, 1, str(tmp_path), "accumulate=1")
    ranks = pool.run(_from_files, 4, str(tmp_path), plan)
    assert whole == {(11, 13)}
    expected = {(6, 7), (6, 6), (5, 7), (5, 6)} if plan == "domain=2x2" else {(11, 7), (11, 6)}
    assert set.union(*(seen for _, _, seen in ranks)) == expected and all(len(seen) == 1 for _, _, seen in ranks)
    for theirs, _, _ in ranks:
        assert theirs == pytest.approx(losses, rel=1e-12)
    torch.testing.assert_close(ranks[0][1], outputs, rtol=1e-12, atol=1e-12)
    written = [np.load(tmp_path / f"{name}.npy") for name in ("accumulate=1", plan)]
    assert written[0].shape == (9, 2, 11, 13) and written[0].std() > 0.01
    np.testing.assert_allclose(written[1], written[0], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(written[0][[0, 5]], outputs.numpy(), rtol=1e-12)
    store = zarr.open_group(str(tmp_path / f"{plan}.zarr"), mode="r")["output"]
    np.testing.assert_array_equal(store[:], written[1])
    assert store.chunks == ((1, 2, 6, 7) if plan == "domain=2x2" else (1, 2, 11, 7))


def test_tiles_are_read_in_the_order_of_a_tensors_dims(pool, tmp_path) -> None:
    """A task that names its dims from the last one on: degrees follow its order, what is read follows the files'."""
    _write_fields(tmp_path)
    (losses, outputs, _), *_ = pool.run(_from_files, 1, str(tmp_path), "accumulate=1")
    ranks = pool.run(_from_files, 2, str(tmp_path), "domain=2", domain_tasks.Reading, (-1, -2))
    assert set.union(*(seen for _, _, seen in ranks)) == {(11, 7), (11, 6)}
    assert ranks[1][0] == pytest.approx(losses, rel=1e-12)
    torch.testing.assert_close(ranks[0][1], outputs, rtol=1e-12, atol=1e-12)


BUGS = (
    ("tiles are read one row early", "part.positions:Positions.region", "(start, start + count)",
     "(max(start - 1, 0), max(start - 1, 0) + count)"),
    ("each rank keeps the field that it is given whole", "data.tiles:own_tile", "positions.region(whole)",
     "tuple((0, n) for n in whole)"),
    ("tiles of outputs are written where the first lies", "data.tiles:_write", "owners.indices(_index(output, name))",
     "np.arange(owners.counts[_index(output, name)])"),
    ("the second half of the samples is written over the first", "data.tiles:_write", "places[0] + first", "places[0]"),
)  # fmt: skip


def _with_a_bug(number: int, folder: str) -> tuple[list[float], set]:
    name, where, old, new = BUGS[number]
    with planted(Bug(name, f"shardwise.{where}", old, new, "", "")) as ran:
        losses, _, seen = _from_files(folder, "domain=2")
        assert ran()
    return losses, seen


@pytest.mark.parametrize("number", range(len(BUGS)))
def test_bugs_of_reading_and_writing_tiles_are_seen(pool, tmp_path, number: int) -> None:
    _write_fields(tmp_path)
    (losses, _, _), *_ = pool.run(_from_files, 1, str(tmp_path), "accumulate=1")
    (theirs, seen), _ = pool.run(_with_a_bug, 2, number, str(tmp_path))
    files = [np.load(tmp_path / f"{name}.npy") for name in ("accumulate=1", "domain=2")]
    right = [
        theirs == pytest.approx(losses, rel=1e-12),
        seen <= {(6, 13), (5, 13)},
        np.allclose(*files, rtol=1e-12),
    ]
    assert not all(right)


class _OneRowMore(domain_tasks.Reading):
    def read(self, indices: list[int], region=None) -> dict:
        if region is not None:
            region = ((region[0][0], region[0][1] + 1), *region[1:])
        return super().read(indices, region)


class _OfOtherShape(domain_tasks.Reading):
    def __init__(self, arrays, global_shape):
        super().__init__(arrays, global_shape)
        self.global_shape = (12, 13)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (_OneRowMore, r"the source gave \(4, 3, 7, 13\) as x, and this rank's tile of \(4, 3, 11, 13\) is \(4, 3, 6,"),
        (_OfOtherShape, r"global_shape=\(12, 13\), and x of a sample read whole is \(3, 11, 13\)"),
    ],
)
def test_a_reader_that_disagrees_with_its_shape_is_named(pool, tmp_path, kind: type, message: str) -> None:
    _write_fields(tmp_path)
    with pytest.raises(InputError, match=message):
        pool.run(_from_files, 2, str(tmp_path), "domain=2", kind)


def test_arrays_without_the_shape_are_named(tmp_path) -> None:
    _write_fields(tmp_path)
    with pytest.raises(InputError, match=r"global_shape=\(5, 5\), and no array's samples end in it: x \(3, 11, 13\)"):
        ArraySource({"x": tmp_path / "x.npy"}, global_shape=(5, 5))
