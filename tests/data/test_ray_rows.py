"""Rows of a Ray Dataset as a source: its own order, its blocks made once, and made again where they are lost."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import numpy as np
import pytest

from shardwise.data import ray_rows
from shardwise.data.ray_rows import RayRows, RaySource
from shardwise.errors import InputError

ray = pytest.importorskip("ray", reason="needs Ray")
ROWS, BLOCKS = 90, 7
pytestmark = pytest.mark.long


@pytest.fixture(scope="module", autouse=True)
def here() -> Iterator[None]:
    """A Ray of this machine."""
    ray.init("local", num_cpus=2, object_store_memory=80 * 2**20, log_to_driver=False, include_dashboard=False)
    yield
    ray.shutdown()


def squares():
    """A dataset of several blocks, whose last row is another number of rows away than a block has."""
    import ray.data

    def row(batch):
        return {"x": np.stack([batch["id"], batch["id"] ** 2], 1).astype(np.float32), "y": batch["id"]}

    return ray.data.range(ROWS, override_num_blocks=BLOCKS).map_batches(row, batch_size=None)


def empty():
    import ray.data

    return ray.data.range(ROWS).filter(lambda row: False)


def none():
    raise ValueError("no such bucket")


def test_rows_lie_in_the_datasets_order() -> None:
    source = RaySource(squares, name="squares")
    assert len(source) == ROWS
    indices = [0, ROWS - 1, 13, 12, 13, 44]
    batch = source.read(indices)
    assert batch["y"].tolist() == indices
    assert batch["x"].tolist() == [[i, i * i] for i in indices]
    assert str(batch["x"].dtype) == "torch.float32"
    assert source.order(3).indices(5, 9).tolist() == [5, 6, 7, 8]
    assert RaySource(squares, name="squares", shuffle=True).order(3).indices(0, ROWS).tolist() != list(range(ROWS))


def test_few_blocks_are_kept_and_another_process_asks_for_its_own() -> None:
    rows = RayRows(squares, "squares", kept=2)
    assert [rows[i]["y"] for i in range(ROWS)] == list(range(ROWS))
    assert len(rows._blocks) == 2
    again = pickle.loads(pickle.dumps(rows))
    assert (again.name, again.kept, again._rows) == (rows.name, 2, None)
    assert again[ROWS - 1]["y"] == ROWS - 1


def test_blocks_are_made_again_where_the_actor_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = RayRows(squares, "lost", kept=1)
    assert rows[0]["y"] == 0
    ray.kill(rows._actor)
    assert [rows[i]["y"] for i in (ROWS - 1, 3, 40)] == [ROWS - 1, 3, 40]


def test_what_cannot_be_read_is_told() -> None:
    with pytest.raises(InputError, match="the dataset has no rows"):
        len(RayRows(empty, "empty"))
    with pytest.raises(InputError, match="cannot be made: no such bucket"):
        len(RayRows(none, "none"))


def test_without_ray_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)

    def refuse(**words: object) -> None:
        raise ConnectionError("Could not find any running Ray instance")

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(InputError, match="ray start --head"):
        ray_rows._join_ray()
