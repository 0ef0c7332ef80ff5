"""Sources of the usual kinds: what they give, in which order on any number of ranks and workers, and bad input."""

from __future__ import annotations

import json
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise import Task, train
from shardwise.data import ArraySource, Blend, JsonlSource, Loader, Order, TokenSource, as_source
from shardwise.data.blend import BLOCK, shares
from shardwise.data.jsonl import packed
from shardwise.errors import InputError
from shardwise.look import samples
from shardwise.observe import InputWatch


def tokens_file(folder: Path, name: str, count: int, base: int = 0) -> Path:
    path = folder / name
    values = (np.arange(count) + base).astype(np.uint16)
    np.save(path, values) if path.suffix == ".npy" else values.tofile(path)
    return path


def lines_file(folder: Path, lines: list[Any]) -> Path:
    path = folder / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


# --- what each gives


@pytest.mark.parametrize("name", ["t.bin", "t.npy"])
def test_windows_of_tokens_overlap_by_one(name: str, tmp_path: Path) -> None:
    source = TokenSource([tokens_file(tmp_path, name, 11), tokens_file(tmp_path, f"b{name}", 8, base=100)], 3)
    assert len(source) == 3 + 2
    assert source.read([0, 2, 3])["tokens"].tolist() == [[0, 1, 2, 3], [6, 7, 8, 9], [100, 101, 102, 103]]
    assert pickle.loads(pickle.dumps(source)).read([4])["tokens"].tolist() == [[103, 104, 105, 106]]


def test_arrays_from_files_and_memory(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(12.0).reshape(6, 2))
    source = ArraySource({"x": tmp_path / "x.npy", "y": np.arange(6)})
    batch = source.read([4, 1])
    assert batch["x"].tolist() == [[8, 9], [2, 3]] and batch["y"].tolist() == [4, 1]


def test_documents_are_packed_masked_and_numbered(tmp_path: Path) -> None:
    path = lines_file(tmp_path, [{"prompt": "ab", "completion": "c"}, {"text": "de"},
                                 {"messages": [{"role": "user", "content": "f"},
                                               {"role": "assistant", "content": "gh"}]}])  # fmt: skip
    source = JsonlSource(path, 8, end=0)
    a, b, c, d, e, f, g, h = range(97, 105)
    assert len(source) == 2
    batch = source.read([0, 1])
    assert batch["input_ids"].tolist() == [[a, b, c, 0, d, e, 0, 0], [f, g, h, 0, 0, 0, 0, 0]]
    assert batch["labels"].tolist() == [[-100, -100, c, 0, -100, e, 0, -100], [-100, g, h, 0, *[-100] * 4]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 0], [0, 1, 2, 3, 0, 1, 2, 3]]
    assert len(JsonlSource(path, 8, end=0, pack=False)) == 3


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40))
def test_packing_keeps_every_document_once_in_order(lengths: list[int]) -> None:
    rows = packed(lengths, 9)
    assert [document for row in rows for document in row] == list(range(len(lengths)))
    assert all(sum(lengths[d] for d in row) <= 9 for row in rows)


def test_packed_documents_do_not_see_each_other(tmp_path: Path) -> None:
    """A transformers model gives packed documents the losses that it gives them alone."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(vocab_size=256, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                                      num_attention_heads=2, num_key_value_heads=2)  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).double().eval()
    path = lines_file(tmp_path, [{"prompt": "one ", "completion": "two three"}, {"text": "four five"}, {"text": "six"}])

    def total(source: JsonlSource) -> float:
        batch = source.read(list(range(len(source))))
        labels = batch.pop("labels")
        with torch.no_grad():
            logits = model(**batch, use_cache=False).logits[:, :-1]
        return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"))

    together, apart = JsonlSource(path, 32), JsonlSource(path, 32, pack=False)
    assert (len(together), len(apart)) == (1, 3)
    assert total(together) == pytest.approx(total(apart), rel=1e-12)


# --- blends


def blend(weights: tuple[float, float] = (3, 1), lengths: tuple[int, int] = (10, 7)) -> Blend:
    a = ArraySource({"x": np.arange(lengths[0])})
    b = ArraySource({"x": np.arange(1000, 1000 + lengths[1])})
    return Blend({"a": (a, weights[0]), "b": (b, weights[1])})


@settings(max_examples=20)
@given(st.floats(0.01, 0.99), st.integers(0, 2 * BLOCK), st.integers(1, 300))
def test_shares_and_positions_of_a_blend(weight: float, start: int, count: int) -> None:
    mixed = blend((weight, 1 - weight), (200, 170))
    order = mixed.order(5)
    before, after = order.positions(start), order.positions(start + count)
    drawn = order.indices(start, start + count)
    assert (drawn < 200).sum() == after["a"] - before["a"]
    assert sum(after.values()) == start + count
    assert abs(after["a"] - weight * (start + count)) <= BLOCK / 4 + (start + count) / BLOCK
    assert sum(shares((weight, 1 - weight))) == BLOCK
    # each source goes through its own samples once an epoch, whatever stands between
    whole = order.indices(0, BLOCK + 500)
    of_a = whole[whole < 200]
    assert all(sorted(of_a[i : i + 200]) == list(range(200)) for i in range(0, len(of_a) - 200, 200))


def test_a_blend_continues_with_other_weights() -> None:
    first = Loader(blend((3, 1), (500, 400)), 0, 16, prefetch=0)
    seen = [x for _ in range(20) for x in next(first)[0].batch["x"].tolist()]
    state = json.loads(json.dumps(first.state_dict()))
    second = Loader(blend((1, 1), (500, 400)), 0, 16, prefetch=0)
    second.load_state_dict(state)
    more = [x for _ in range(20) for x in next(second)[0].batch["x"].tolist()]
    assert not set(seen) & set(more)  # no source starts over
    same = Loader(blend((3, 1), (500, 400)), 0, 16, prefetch=0)
    same.load_state_dict(state)
    assert next(same)[0].batch["x"].tolist() == next(first)[0].batch["x"].tolist()
    again = Loader(blend((1, 1), (500, 400)), 0, 16, prefetch=0)
    again.load_state_dict(json.loads(json.dumps(second.state_dict())))
    assert next(again)[0].batch["x"].tolist() == next(second)[0].batch["x"].tolist()
    parts = blend((3, 1), (500, 400))
    turned = Blend({name: (parts.sources[at], parts.weights[at]) for at, name in ((1, "b"), (0, "a"))})
    other_order = Loader(turned, 0, 16, prefetch=0)
    other_order.load_state_dict(json.loads(json.dumps(state, sort_keys=True)))  # as a manifest has it
    rest = [x for _ in range(20) for x in next(other_order)[0].batch["x"].tolist()]
    assert not set(seen) & set(rest)  # the same sources, named in another order
    with pytest.raises(InputError, match="the saved run read a, b, this one a, c"):
        other = Blend({"a": (ArraySource({"x": np.arange(500)}), 1), "c": (ArraySource({"x": np.arange(400)}), 1)})
        Loader(other, 0, 16).load_state_dict(state)


# --- order


def source_of(kind: str, folder: str) -> Any:
    if kind == "blend":
        paths = [Path(folder) / name for name in ("one.bin", "two.npy")]
        return Blend({path.stem: (TokenSource(path, 4), weight) for path, weight in zip(paths, (5, 2), strict=True)})
    return JsonlSource(Path(folder) / "lines.jsonl", 12)


def sequence(kind: str, folder: str, ranks: int, workers: int, steps: int = 7) -> list[str]:
    """Global batches, put together from all ranks' parts."""
    loaders = [Loader(source_of(kind, folder), 3, 5, accumulate=2, data_rank=rank, data_ranks=ranks, workers=workers)
               for rank in range(ranks)]  # fmt: skip
    try:
        found = []
        for _ in range(steps):
            parts = [next(loader) for loader in loaders]
            rows = [leaf[: part.count] for micro in zip(*parts, strict=True) for part in micro
                    for leaf in torch.utils._pytree.tree_leaves(part.batch)[:1]]  # fmt: skip
            found.append(str(torch.cat(rows).tolist()))
        return found
    finally:
        for loader in loaders:
            loader.close()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    tokens_file(tmp_path, "one.bin", 200)
    tokens_file(tmp_path, "two.npy", 90, base=1000)
    lines_file(tmp_path, [{"text": "ab" * (1 + i % 5)} for i in range(30)])
    return str(tmp_path)


@pytest.mark.parametrize("kind", ["blend", "packed"])
def test_the_order_does_not_depend_on_ranks(kind: str, folder: str) -> None:
    alone = sequence(kind, folder, 1, 0)
    assert len(set(alone)) == len(alone)
    for ranks in (2, 3, 4):
        assert sequence(kind, folder, ranks, 0) == alone


@pytest.mark.parametrize(
    ("kind", "ranks", "workers"),
    [("blend", 1, 3), *(pytest.param(kind, ranks, workers, marks=pytest.mark.long)
                        for kind in ("blend", "packed") for ranks in (1, 2, 3, 4) for workers in (1, 3))],
)  # fmt: skip
def test_nor_on_workers(kind: str, ranks: int, workers: int, folder: str) -> None:
    assert sequence(kind, folder, ranks, workers) == sequence(kind, folder, 1, 0)


def test_a_worker_that_fails_is_told_as_itself(tmp_path: Path) -> None:
    source = TokenSource(tokens_file(tmp_path, "t.bin", 100), 3, vocab=50)
    with (
        Loader(source, 0, 8, workers=1) as loader,
        pytest.raises(InputError, match=r"t\.bin: token \d+ is \d+, beyond"),
    ):
        for _ in range(4):
            next(loader)


# --- bad input


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('{"text": "a b"}\n{"text": \n', r"lines.jsonl:2: not JSON"),
        ('{"text": "a b"}\n\n[1]\n', r"lines.jsonl:3: a list; expected ."),
        ('{"txt": "a"}\n', r"lines.jsonl:1: has txt; expected .*prompt"),
        ('{"text": 3}\n', r"lines.jsonl:1: 3 where text should be; expected "),
        ('{"prompt": "a b", "completion": ""}\n', r"lines.jsonl:1: nothing to learn"),
        ("", "there is no line to learn from"),
    ],
)
def test_bad_lines_are_named_by_file_and_line(lines: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(lines)
    with pytest.raises(InputError, match=words):
        JsonlSource(path, 16)


def test_token_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"abc")
    np.save(tmp_path / "real.npy", np.zeros(9))
    for name, words in (("odd.bin", "3 bytes"), ("real.npy", "float64"), ("no.bin", "no.bin"), ("t.bin", "too few")):
        tokens_file(tmp_path, "t.bin", 3)
        with pytest.raises(InputError, match=words):
            TokenSource(tmp_path / name, 4)
    with pytest.raises(InputError, match=r"long.bin: token 6 is 6, beyond the vocabulary of 6"):
        TokenSource(tokens_file(tmp_path, "long.bin", 30), 4, vocab=6).read([1])


class Ragged:
    def __init__(self, bad: Any) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"image": torch.zeros(2, 3)} if index != 5 else self.bad


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"image": torch.zeros(2, 4)}, r"sample 5: field \['image'\] is float32 \(2, 4\), but float32 \(2, 3\) in"),
        ({"image": torch.zeros(2, 3).double()}, r"sample 5: field \['image'\] is float64 \(2, 3\)"),
        ({"picture": torch.zeros(2, 3)}, r"sample 5: field \['(image|picture)'\] is"),
    ],
)
def test_a_sample_of_another_shape_is_named(bad: Any, words: str) -> None:
    loader = Loader(as_source(Ragged(bad)), 0, 4, prefetch=0)
    with pytest.raises(InputError, match=words):
        next(loader), next(loader)


class Streamed(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return iter([])


def test_any_map_style_dataset_is_a_tasks_data() -> None:
    task = Task(torch.nn.Linear, lambda output, batch: (output.sum(), 1), data=Ragged({"image": torch.zeros(2, 3)}))
    assert len(task.data) == 8 and task.data.read([0, 3])["image"].shape == (2, 2, 3)  # type: ignore[arg-type, union-attr]
    assert task.with_(name="other").data is task.data
    with pytest.raises(InputError, match="Streamed cannot be a source: an iterable dataset has no samples by index"):
        Task(torch.nn.Linear, lambda output, batch: (output.sum(), 1), data=Streamed())


@pytest.mark.parametrize("workers", [0, 2])
def test_hugging_face_datasets_from_disk(workers: int, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the package datasets, which is not installed here")
    rows = {"input_ids": [[i, i + 1, i + 2] for i in range(8)], "text": [f"line {i}" for i in range(8)]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "set"))
    columns = datasets.load_from_disk(str(tmp_path / "set")).select_columns(["input_ids"]).with_format("torch")
    task = Task(torch.nn.Linear, lambda output, batch: (output.sum(), 1), data=columns)
    loaders = [Loader(task.data, 3, 4, data_rank=rank, data_ranks=2, workers=workers) for rank in (0, 1)]  # type: ignore[arg-type]
    seen = [part.batch["input_ids"] for loader in loaders for part in next(loader)]
    order = Order(8, 3).indices(0, 4)
    assert torch.equal(torch.cat(seen), torch.tensor([[i, i + 1, i + 2] for i in order]))


class Rows:
    """As a Hugging Face dataset reads: columns as Python numbers and lists, several rows at once by `__getitems__`."""

    def __len__(self) -> int:
        return 6

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self[i] for i in indices]

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"label": index, "tokens": [index, index + 1], "text": f"line {index}"}


def test_columns_of_python_values_are_joined() -> None:
    batch = as_source(Rows()).read([1, 4])
    assert batch["label"].tolist() == [1, 4] and batch["text"] == ["line 1", "line 4"]


def test_tensors_with_a_row_for_each_sample_are_samples() -> None:
    x, y = torch.arange(12.0).view(6, 2), np.arange(6)
    pair, named = as_source((x, y)), as_source({"x": x, "y": y})
    assert (len(pair), len(named)) == (6, 6)
    rows, labels = pair.read([1, 4])
    assert torch.equal(rows, x[[1, 4]]) and labels.tolist() == [1, 4]
    assert torch.equal(named.read([0, 5])["x"], x[[0, 5]])
    assert len(as_source(tuple(torch.zeros(2) for _ in range(5)))) == 5  # more than rows: samples
    with pytest.raises(InputError, match=r"tuple of tensors of shapes \(6, 2\), \(6, 2\): samples, or.*TensorDataset"):
        as_source((x, x))
    with pytest.raises(InputError, match=r"\(6, 2\), \(5,\): .*one row for each sample"):
        as_source((x, y[:5]))


class Damaged(Ragged):
    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise OSError("scene_5.npy: cannot reshape")
        return super().__getitem__(index)


def test_a_sample_that_cannot_be_read_is_named() -> None:
    loader = Loader(as_source(Damaged({"image": torch.zeros(2, 3)})), 0, 4, prefetch=0)
    with pytest.raises(InputError, match="Damaged: sample 5 cannot be read: OSError: scene_5"):
        next(loader), next(loader)


class Growing(list):
    def read(self, indices: list[int], region: Any = None) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([self[i] for i in indices])}


def test_a_source_that_changes_its_length_is_told() -> None:
    source = Growing(range(10))
    loader = Loader(source, 0, 4, prefetch=0)
    next(loader)
    source.append(10)
    with pytest.raises(InputError, match="Growing had 10 samples when the run began and has 11 now"):
        next(loader)
    loader = Loader(as_source(columns := Columns()), 0, 4, prefetch=0)  # told by the dataset's name, not its wrapper's
    columns.rows.append(0)
    with pytest.raises(InputError, match="Columns had 8 samples when the run began and has 9 now"):
        next(loader)


class Columns:
    def __init__(self) -> None:
        self.rows = list(range(8))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.rows[index])


def test_arrays_of_the_other_order_of_bytes_are_read(tmp_path: Path) -> None:
    np.save(tmp_path / "big.npy", np.arange(6, dtype=">f4").reshape(3, 2))
    batch = ArraySource({"x": tmp_path / "big.npy"}, global_shape=(2,)).read([2, 0])
    assert batch["x"].equal(torch.tensor([[4.0, 5.0], [0.0, 1.0]]))
    part = ArraySource({"x": np.arange(6, dtype=">i8").reshape(3, 2)}, global_shape=(2,)).read([1], ((1, 2),))
    assert part["x"].equal(torch.tensor([[3]]))


def test_files_that_hold_no_array_or_several_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.npy").touch()
    with (tmp_path / "several.npy").open("wb") as file:
        np.savez(file, a=np.arange(9), b=np.arange(9))
    for name in ("empty.npy", "several.npy"):
        with pytest.raises(InputError, match=name):
            TokenSource(tmp_path / name, 2)
        with pytest.raises(InputError, match=name):
            ArraySource({"x": tmp_path / name})


def test_sources_of_a_blend_must_fit() -> None:
    mixed = Blend({"a": (ArraySource({"x": np.zeros((3, 2))}), 1), "b": (ArraySource({"x": np.zeros((3, 4))}), 1)})
    with pytest.raises(InputError, match=r"field \['x'\] is .* in 'a', .* in 'b'"):
        mixed.read([0, 4])
    for weight in (0.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="source 'a' has weight"):
            blend((weight, 1))


def test_a_batch_of_a_gibibyte_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert samples.costly({"x": torch.zeros(3)}) == []
    monkeypatch.setattr(samples, "COSTLY_BYTES", 10)
    (word,) = samples.costly({"x": torch.zeros(3)})
    assert "on every rank in each step" in word and "Task.data" in word


# --- a run that waits for its input


class Slow:
    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s

    def __len__(self) -> int:
        return 64

    def read(self, indices: list[int], region: Any = None) -> torch.Tensor:
        time.sleep(self.wait_s)
        return torch.ones(len(indices), 4)


def slow_task(wait_s: float) -> Task:
    return Task(model=lambda: torch.nn.Linear(4, 4), data=Slow(wait_s),
                loss=lambda output, batch: (output.square().sum(), len(output)))  # fmt: skip


def test_a_slow_source_is_named_once(tmp_path: Path) -> None:
    run = train(slow_task(0.03), steps=70, out=str(tmp_path))
    (word,) = [note for note in run.summary["notices"] if "input-bound" in note]
    assert "train.workers to 2 (now 0), or make reading of Slow cheaper" in word
    assert all("input_seconds" in record for record in run.metrics if "loss" in record)


def test_a_fast_source_is_not_named() -> None:
    watch = InputWatch(lambda share: [share], "read faster")
    assert not any(watch.add(0.0002, 0.006) for _ in range(70))


def test_the_rank_that_waits_is_named() -> None:
    watch = InputWatch(lambda share: [0.01, share, 0.02], "read faster")
    words = [watch.add(0.004, 0.006) for _ in range(70)]
    assert [word for word in words if word] == [
        "input-bound: rank 1 spent 40% of each step (10 ms) waiting for its batch: read faster"
    ]


def test_files_of_another_kind_are_told(tmp_path: Path) -> None:
    np.savez(tmp_path / "two.npz", x=np.zeros(3), y=np.zeros(3))
    np.save(tmp_path / "cut.npy", np.zeros((64, 32)))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "cut.npy").read_bytes()[:2000])
    for name, told in (("two.npz", r"several arrays \(x, y\), and a file holds one"), ("cut.npy", "it was cut short")):
        with pytest.raises(InputError, match=told):
            ArraySource({"x": tmp_path / name})
    np.arange(500, dtype="uint32").tofile(tmp_path / "t.bin")
    with pytest.raises(InputError, match=r'every second of its first 1000 numbers is 0.*give dtype="uint32"'):
        TokenSource(tmp_path / "t.bin", 16)
    assert len(TokenSource(tmp_path / "t.bin", 16, dtype="uint32")) == 31


def test_a_blend_names_the_fields() -> None:
    sources = {name: ArraySource({field: np.zeros((4, 2))}) for name, field in (("a", "x"), ("b", "image"))}
    with pytest.raises(InputError, match=r"a has \['x'\]; b has \['image'\]"):
        Blend({name: (source, 1.0) for name, source in sources.items()}).read([0, 5])
