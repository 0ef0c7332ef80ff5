"""The data room: order, dealing, loader, corpus, digits, and the cutting of a global batch."""

from __future__ import annotations

import collections
import gc
import json
import math
import pickle
import subprocess
import sys
import threading
import time
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from shardwise.data import (
    BytesSource,
    Corpus,
    DigitsSource,
    Loader,
    Order,
    as_source,
    digits_split,
    evaluation_parts,
    parts_of,
    samples_in,
    split,
    standard_library_corpus,
    write_corpus,
)
from shardwise.errors import InputError, RunError

few = settings(max_examples=40, deadline=None)


class Numbers:
    """Sample i is the number i; counts and remembers what is read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return self.length

    def read(self, indices, region=None):
        self.asked.append(list(indices))
        return {"x": torch.tensor(indices)}


class Broken(Numbers):
    """Answers with `answer(indices)`."""

    def __init__(self, length, answer) -> None:
        super().__init__(length)
        self.answer = answer

    def read(self, indices, region=None):
        return self.answer(indices)


def counted(parts) -> list[list[int]]:
    """The samples that count, for each micro-batch."""
    return [part.batch["x"][: part.count].tolist() for part in parts]


def global_steps(source_length, batch_size, ranks, steps=None, **options):
    """(the steps, each its micro-batches joined over the loaders of all ranks; the state of each loader)."""
    loaders = [
        Loader(Numbers(source_length), 3, batch_size, data_rank=r, data_ranks=ranks, prefetch=0, **options)
        for r in range(ranks)
    ]
    joined = []
    for of_ranks in zip(*loaders, strict=True):
        joined.append([joined_micro_batch(parts) for parts in zip(*of_ranks, strict=True)])
        if len(joined) == steps:
            break
    return joined, [loader.state_dict() for loader in loaders]


def joined_micro_batch(parts) -> list[int]:
    """One micro-batch from the parts of all ranks; start and total must say where each part lies."""
    samples: list[int] = []
    for part in parts:
        assert part.start == len(samples)
        assert samples_in(part.batch) == max(part.count, 1)
        samples += counted([part])[0]
    assert {part.total for part in parts} == {len(samples)}
    return samples


# ---------------------------------------------------------------- order


@few
@given(st.integers(1, 300), st.integers(-(2**70), 2**70), st.integers(0, 5))
def test_each_sample_once_an_epoch(length, seed, epoch):
    indices = Order(length, seed).indices(epoch * length, (epoch + 1) * length)
    assert sorted(indices.tolist()) == list(range(length))


@few
@given(st.integers(1, 40), st.integers(0, 200), st.integers(0, 120), st.integers(0, 120))
def test_order_is_a_function_of_position(length, start, first, second):
    order = Order(length, 5)
    whole = order.indices(start, start + first + second)
    halves = [order.indices(start, start + first), order.indices(start + first, start + first + second)]
    assert np.array_equal(whole, np.concatenate(halves))


def test_the_order_never_changes():
    """A saved run continues with these values; another mixing needs another name."""
    assert Order(10, 0).indices(0, 20).tolist() == PINNED
    assert Order(2**33, 7).indices(2**33 - 2, 2**33 + 2).tolist() == PINNED_LARGE


PINNED = [2, 5, 3, 0, 7, 9, 4, 6, 1, 8, 0, 6, 9, 7, 8, 5, 3, 4, 1, 2]
PINNED_LARGE = [130969717, 3638234328, 3158961521, 1546056954]


@pytest.mark.parametrize("length", [2**33, 2**61 - 1, 2**62 - 1])
def test_a_large_order_is_not_materialised(length):
    indices = Order(length, 1).indices(length - 5000, length + 5000)  # as a list it would take 64 GiB and more
    assert indices.min() >= 0 and indices.max() < length
    assert len(set(indices[:5000].tolist())) == len(set(indices[5000:].tolist())) == 5000


def test_unshuffled_order_and_bad_arguments():
    assert Order(4, shuffle=False).indices(2, 9).tolist() == [2, 3, 0, 1, 2, 3, 0]
    assert Order(4).indices(3, 3).tolist() == []
    for length in (0, -1, 2**62):
        with pytest.raises(InputError, match="at least one sample"):
            Order(length)
    with pytest.raises(InputError, match="seed"):
        Order(4, seed=0.5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="start at 0"):
        Order(4).indices(-1, 2)


def chi_square(counts: np.ndarray) -> float:
    """The chi-square statistic against equal counts, in standard deviations from its mean."""
    expected = counts.mean()
    freedom = counts.size - 1
    return (((counts - expected) ** 2).sum() / expected - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_all_permutations_are_equally_likely(length):
    seen = collections.Counter(tuple(Order(length, seed).indices(0, length)) for seed in range(4000))
    assert len(seen) == math.factorial(length)
    assert abs(chi_square(np.array(list(seen.values())))) < 5


@pytest.mark.parametrize("length", [1000, 65536, 2**33])
def test_no_visible_order(length):
    drawn = min(length, 20_000)
    indices = Order(length, 11).indices(0, drawn)
    if length > drawn:
        assert abs(chi_square(np.bincount(indices * 64 // length, minlength=64))) < 6
    steps = np.diff(indices) % length
    assert abs(chi_square(np.bincount(steps * 32 // length, minlength=32))) < 6
    assert abs(np.corrcoef(indices, np.arange(drawn))[0, 1]) < 5 / math.sqrt(drawn)
    assert abs(np.corrcoef(indices[1:], indices[:-1])[0, 1]) < 5 / math.sqrt(drawn)


def test_epochs_and_seeds_differ():
    order = Order(1000, 1)
    first, second = order.indices(0, 1000), order.indices(1000, 2000)
    assert (first == second).sum() < 10
    assert (first == Order(1000, 2).indices(0, 1000)).sum() < 10
    assert np.array_equal(first, Order(1000, 1).indices(0, 1000))


# ---------------------------------------------------------------- loader


@few
@given(st.integers(4, 40), st.integers(4, 16), st.integers(1, 4), st.booleans())
def test_the_global_sequence_is_the_same_on_any_number_of_ranks(length, batch, accumulate, drop):
    batch = min(batch, length)
    runs = [
        global_steps(length, batch, ranks, epochs=2, accumulate=accumulate, drop_last=drop) for ranks in (1, 2, 3, 4)
    ]
    for steps, states in runs:
        assert steps == runs[0][0]
        assert all(state == runs[0][1][0] for state in states)
    flat = [i for step in runs[0][0] for micro in step for i in micro]
    if drop:
        kept = length // batch * batch
        assert len(flat) == 2 * kept
        assert len(set(flat[:kept])) == len(set(flat[kept:])) == kept
    else:
        assert sorted(flat[:length]) == sorted(flat[length:]) == list(range(length))


@few
@given(st.integers(4, 30), st.integers(4, 9), st.integers(0, 9), st.booleans(), st.data())
def test_resume_on_another_number_of_ranks(length, batch, taken, drop, data):
    batch = min(batch, length)
    before, after = (data.draw(st.integers(1, 4)) for _ in range(2))
    options = {"accumulate": 2, "drop_last": drop, "epochs": 3}
    whole, _ = global_steps(length, batch, 1, **options)
    taken = min(taken, len(whole))
    position = global_steps(length, batch, before, taken, **options)[1][0]["position"] if taken else 0
    rest, _ = global_steps(length, batch, after, start=position, **options)
    assert whole[taken:] == rest


def test_state_dict_round_trip_and_position_counts_what_was_handed_out():
    with Loader(Numbers(10), 0, 4, prefetch=3) as loader:
        assert loader.steps_per_epoch == 3
        seen = [counted(next(loader)) for _ in range(4)]
        assert (loader.position, loader.epoch) == (14, 1)  # 4 + 4 + 2 + 4, though more was read ahead
        state = json.loads(json.dumps(loader.state_dict()))
        following = counted(next(loader))
    with Loader(Numbers(10), 0, 4) as other:
        next(other)
        other.load_state_dict(state)
        assert counted(next(other)) == following
        with pytest.raises(InputError, match="seed=0, this one has seed=1"):
            Loader(Numbers(10), 1, 4).load_state_dict(state)
        with pytest.raises(InputError, match="length=10, this one has length=11"):
            Loader(Numbers(11), 0, 4).load_state_dict(state)
        with pytest.raises(InputError, match="no position"):
            other.load_state_dict({"length": 10, "seed": 0, "shuffle": True})
    assert len({tuple(micro) for step in seen for micro in step}) == 4


def test_uneven_last_batch_gives_stand_ins():
    loaders = [Loader(Numbers(9), 0, 8, data_rank=r, data_ranks=4, prefetch=0, epochs=1) for r in range(4)]
    steps = [list(loader) for loader in loaders]
    assert [len(of_rank) for of_rank in steps] == [2] * 4
    last = [of_rank[1][0] for of_rank in steps]
    assert sorted(part.count for part in last) == [0, 0, 0, 1]
    assert {part.total for part in last} == {1}
    assert len({part.batch["x"].item() for part in last}) == 1  # all run the one sample of the micro-batch


def test_fewer_micro_batches_when_the_last_batch_is_small():
    for ranks in (1, 2, 3):
        for rank in range(ranks):
            loader = Loader(Numbers(11), 0, 8, accumulate=4, data_rank=rank, data_ranks=ranks, epochs=1)
            assert [len(parts) for parts in loader] == [4, 3]


def test_a_rank_reads_only_its_samples():
    source = Numbers(16)
    loader = Loader(source, 0, 8, accumulate=2, data_rank=1, data_ranks=4, epochs=1, prefetch=0)
    parts = next(loader)
    assert source.asked == counted(parts)
    assert [len(asked) for asked in source.asked] == [1, 1]


def test_a_loop_left_early_goes_on():
    loader = Loader(Numbers(12), Order(12, shuffle=False), 4, epochs=1)
    for parts in loader:
        assert counted(parts) == [[0, 1, 2, 3]]
        break
    assert [counted(parts) for parts in loader] == [[[4, 5, 6, 7]], [[8, 9, 10, 11]]]
    assert list(loader) == []


@pytest.mark.parametrize(
    ("length", "options", "message"),
    [
        (0, {}, "empty"),
        (8, {"data_ranks": 5}, "5 data ranks"),
        (3, {"data_ranks": 4}, "3 samples for 4 data ranks"),
        (8, {"accumulate": 5}, "smaller than accumulate"),
        (3, {"drop_last": True}, "no batch at all"),
        (8, {"data_rank": 2, "data_ranks": 2}, "data_rank must be in"),
        (8, {"batch_size": 0}, "at least 1"),
        (8, {"start": -1}, "negative"),
        (8, {"order": Order(9)}, "over 9 samples but the source has 8"),
    ],
)
def test_impossible_loaders_are_refused(length, options, message):
    arguments = {"order": 0, "batch_size": 4} | options
    with pytest.raises(InputError, match=message):
        Loader(Numbers(length), **arguments)


def test_something_that_is_no_source_is_refused():
    with pytest.raises(InputError, match="not a source"):
        Loader([1, 2, 3], 0, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda i: {"x": torch.zeros(len(i) + 1)}, r"Broken.read\(...\)\['x'\] has 5 samples where 4"),
        (lambda i: {"x": torch.zeros(4), "y": [torch.zeros(3)]}, r"\['y'\]\[0\] has 3"),
        (lambda i: {"x": 1}, "needs a tensor"),
        (lambda i: {"x": {1, 2}}, r"\['x'\] is a builtins.set"),
    ],
)
def test_a_wrong_read_is_named(prefetch, answer, message):
    with Loader(Broken(8, answer), 0, 4, prefetch=prefetch) as loader, pytest.raises(InputError, match=message):
        next(loader)


def prefetching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "shardwise-prefetch"]


def wait_until_none() -> bool:
    deadline = time.monotonic() + 5
    while prefetching() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not prefetching()


def test_an_exception_reaches_the_consumer_after_the_steps_before_it():
    def answer(indices):
        if 5 in indices:
            raise OSError("disk gone")
        return {"x": torch.tensor(indices)}

    loader = Loader(Broken(8, answer), Order(8, shuffle=False), 2)
    assert [counted(next(loader)) for _ in range(2)] == [[[0, 1]], [[2, 3]]]
    with pytest.raises(OSError, match="disk gone"):
        next(loader)
    assert loader.position == 4  # the step that failed was not handed out
    assert wait_until_none()


def test_the_thread_ends_on_close_at_the_end_and_on_collection():
    assert wait_until_none()
    loader = Loader(Numbers(100), 0, 1, prefetch=1)
    next(loader)
    assert len(prefetching()) == 1
    loader.close()
    assert not prefetching()
    next(loader)
    del loader
    gc.collect()
    assert wait_until_none()
    assert len(list(Loader(Numbers(3), 0, 1, epochs=1))) == 3
    assert wait_until_none()


def test_prefetch_is_bounded():
    source = Numbers(100)
    with Loader(source, 0, 1, prefetch=2) as loader:
        next(loader)
        time.sleep(0.2)
        assert len(source.asked) <= 4  # one handed out, two in the queue, one waiting to enter it


def test_a_hanging_read_meets_the_deadline():
    released = threading.Event()

    def answer(indices):
        released.wait(20)
        return {"x": torch.tensor(indices)}

    loader = Loader(Broken(8, answer), 0, 4, read_timeout_s=0.1)
    threading.Timer(0.4, released.set).start()
    with pytest.raises(RunError, match=r"Broken.read gave nothing for 0.1 s"):
        next(loader)
    assert wait_until_none()


def test_a_process_ends_with_a_loader_open():
    program = (
        "import sys, torch\n"
        "from shardwise.data import Loader\n"
        "assert 'shardwise.engine' not in sys.modules  # a second, which a process that reads does not need\n"
        "class S:\n"
        "    def __len__(self): return 9\n"
        "    def read(self, indices, region=None): return torch.tensor(indices)\n"
        "loader = Loader(S(), 0, 2)\n"
        "next(loader)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


# ---------------------------------------------------------------- cutting a batch


class Pair(NamedTuple):
    left: torch.Tensor
    right: object


@few
@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 4))
def test_parts_concatenate_back_to_the_batch(samples, accumulate, ranks):
    accumulate = min(accumulate, samples)
    batch = {
        "x": torch.randn(samples, 3),
        "nest": [Pair(torch.arange(samples), None), (np.arange(2 * samples).reshape(samples, 2), "name")],
        "scalar": torch.tensor(2.5),
        "k": 7,
    }
    of_ranks = [parts_of(batch, accumulate=accumulate, data_rank=r, data_ranks=ranks) for r in range(ranks)]
    kept = [part for micro in zip(*of_ranks, strict=True) for part in micro if part.count]
    assert torch.equal(torch.cat([part.batch["x"] for part in kept]), batch["x"])
    assert torch.equal(torch.cat([part.batch["nest"][0].left for part in kept]), torch.arange(samples))
    assert np.array_equal(np.concatenate([part.batch["nest"][1][0] for part in kept]), batch["nest"][1][0])
    for part in (part for parts in of_ranks for part in parts):
        assert samples_in(part.batch) == max(part.count, 1)
        assert part.batch["k"] == 7 and part.batch["scalar"] == 2.5 and part.batch["nest"][0].right is None
        assert isinstance(part.batch["nest"][0], Pair)


def test_parts_are_those_of_the_loader():
    loader = Loader(Numbers(7), Order(7, shuffle=False), 7, accumulate=3, data_rank=1, data_ranks=2, epochs=1)
    (read,) = list(loader)
    cut = parts_of({"x": torch.arange(7)}, accumulate=3, data_rank=1, data_ranks=2)
    for left, right in zip(read, cut, strict=True):
        assert (left.count, left.start, left.total) == (right.count, right.start, right.total)
        assert torch.equal(left.batch["x"], right.batch["x"])


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"a": torch.ones(3), "b": [torch.ones(2)]}, r"batch\['a'\] has 3 samples but batch\['b'\]\[0\] has 2"),
        ({}, "needs a tensor"),
        (torch.tensor(1.0), "needs a tensor"),
        (torch.ones(0, 4), "batch of 0 samples"),
        ([pack_sequence([torch.ones(3)])], r"batch\[0\] is a torch.*PackedSequence"),
        (torch.eye(3).to_sparse(), "layout torch.sparse_coo"),
        ({"a": collections.UserDict(b=torch.ones(3))}, r"batch\['a'\] is a collections.UserDict"),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(batch, message):
    with pytest.raises(InputError, match=message):
        parts_of(batch)


def test_too_few_samples_and_wrong_ranks_are_refused():
    with pytest.raises(InputError, match="2 samples cannot be split into accumulate=3"):
        parts_of(torch.ones(2), accumulate=3)
    with pytest.raises(InputError, match="accumulate must be"):
        parts_of(torch.ones(2), accumulate=0)
    with pytest.raises(InputError, match="data_rank"):
        parts_of(torch.ones(2), data_rank=1)


# ---------------------------------------------------------------- evaluation


@few
@given(st.integers(1, 30), st.integers(1, 12), st.integers(1, 4))
def test_evaluation_reads_each_sample_once_in_order(length, batch_size, ranks):
    of_ranks = [list(evaluation_parts(Numbers(length), batch_size, r, ranks)) for r in range(ranks)]
    assert len({len(steps) for steps in of_ranks}) == 1
    seen = [i for steps in zip(*of_ranks, strict=True) for (part,) in steps for i in counted([part])[0]]
    assert seen == list(range(length))


def test_evaluation_checks_its_arguments_at_once():
    with pytest.raises(InputError, match="empty"):
        evaluation_parts(Numbers(0), 4)
    with pytest.raises(InputError, match="at least 1"):
        evaluation_parts(Numbers(4), 0)


# ---------------------------------------------------------------- corpus


def test_corpus_round_trip(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"hello ")
    written = write_corpus([tmp_path / "a.txt", str(tmp_path / "a.txt"), b"\xff\x00"], tmp_path / "c", source="test")
    opened = Corpus.open(tmp_path / "c")
    for corpus in (written, opened, pickle.loads(pickle.dumps(opened))):
        assert bytes(corpus.tokens) == b"hello hello \xff\x00"
        assert (len(corpus), corpus.source) == (14, "test")
    assert len(pickle.dumps(opened)) < 1000
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["corpus.json", "tokens.bin"]
    assert bytes(write_corpus(b"anew", tmp_path / "c").tokens) == b"anew"
    assert bytes(opened.tokens) == b"hello hello \xff\x00"  # the open one keeps the old file


def spoil(folder, **changes):
    path = folder / "corpus.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "corpus.json").unlink(), "corpus.json is missing.*write_corpus"),
        (lambda f: (f / "tokens.bin").unlink(), "tokens.bin cannot be read.*write the corpus again"),
        (lambda f: (f / "tokens.bin").write_bytes(b"hel"), "tokens.bin has 3 bytes where corpus.json says 5"),
        (lambda f: (f / "tokens.bin").write_bytes(b"hallo"), "tokens.bin does not have the sha256"),
        (lambda f: (f / "corpus.json").write_text("{"), "corpus.json cannot be read"),
        (lambda f: (f / "corpus.json").write_text("[1]"), "format version None"),
        (lambda f: spoil(f, version=2), "format version 2, this shardwise reads 1"),
        (lambda f: spoil(f, dtype="uint16"), "wrong dtype"),
        (lambda f: spoil(f, count="5"), "wrong count"),
    ],
)
def test_damaged_corpora_are_named(tmp_path, damage, message):
    write_corpus(b"hello", tmp_path)
    damage(tmp_path)
    with pytest.raises(InputError, match=message):
        Corpus.open(tmp_path)


def test_nothing_is_left_of_a_failed_write(tmp_path):
    with pytest.raises(InputError, match="no text"):
        write_corpus([b""], tmp_path / "c")
    with pytest.raises(InputError, match="absent"):
        write_corpus([b"text", tmp_path / "absent"], tmp_path / "c")
    with pytest.raises(InputError, match="paths and bytes, got a int"):
        write_corpus([3], tmp_path / "c")  # type: ignore[list-item]
    assert list((tmp_path / "c").iterdir()) == []


@few
@given(st.integers(1, 200), st.integers(1, 9), st.floats(0.01, 0.99))
def test_split_is_contiguous_and_covers_the_windows(tmp_path_factory, count, seq_len, held_out):
    folder = tmp_path_factory.mktemp("split")
    corpus = write_corpus(bytes(range(256))[:count], folder)
    windows = count // (seq_len + 1)
    if windows < 2 or windows == max(1, round(windows * held_out)):
        with pytest.raises(InputError, match="too few"):
            split(corpus, seq_len, held_out)
        return
    train, held = split(corpus, seq_len, held_out)
    assert len(train) > 0 and len(held) > 0 and len(train) + len(held) == windows
    read = [source.read(list(range(len(source))))["tokens"] for source in (train, held)]
    assert all(tokens.dtype == torch.int64 and tokens.shape[1] == seq_len + 1 for tokens in read)
    assert torch.cat(read).flatten().tolist() == list(range(windows * (seq_len + 1)))


def test_bytes_source_refuses_what_is_not_there(tmp_path):
    corpus = write_corpus(b"0123456789", tmp_path)
    with pytest.raises(InputError, match="do not lie in a corpus of 10"):
        BytesSource(corpus, 2, 0, 11)
    with pytest.raises(InputError, match="seq_len"):
        BytesSource(corpus, 0)
    with pytest.raises(InputError, match="fraction"):
        split(corpus, 2, 1.0)
    with pytest.raises(InputError, match="seq_len"):
        split(corpus, -1)
    for index in (3, -1):
        with pytest.raises(IndexError):
            BytesSource(corpus, 2).read([index])


def test_the_standard_library_is_a_corpus(tmp_path):
    corpus = standard_library_corpus(tmp_path, limit=200_000)
    assert len(corpus) == 200_000
    assert b"import " in bytes(corpus.tokens)
    assert standard_library_corpus(tmp_path / "again", limit=200_000).sha256 == corpus.sha256
    (corpus.folder / "tokens.bin").write_bytes(b"broken")
    assert standard_library_corpus(tmp_path, limit=200_000).sha256 == corpus.sha256


def test_two_writers_of_one_corpus_do_no_harm(tmp_path):
    results: list = []

    def build():
        try:
            results.append(standard_library_corpus(tmp_path, limit=50_000).sha256)
        except BaseException as error:
            results.append(error)

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and len(set(results)) == 1


# ---------------------------------------------------------------- digits and datasets


def test_digits():
    pytest.importorskip("sklearn")
    train, held = digits_split(0.2)
    assert len(train) + len(held) == len(DigitsSource()) == 1797
    batch = train.read([3, 1, 4])
    assert batch["image"].shape == (3, 1, 8, 8) and batch["image"].dtype == torch.float32
    assert batch["label"].shape == (3,) and batch["label"].dtype == torch.int64
    assert train.images.min() >= 0 and train.images.max() == 1
    again = digits_split(0.2)[1]
    assert torch.equal(held.images, again.images) and torch.equal(held.labels, again.labels)
    from sklearn.datasets import load_digits

    data, whole = load_digits(), DigitsSource()
    assert (whole.images[:, 0].numpy() * 16 == data.images).all() and (whole.labels.numpy() == data.target).all()
    assert len(held.labels.unique()) == 10
    both = torch.cat([train.labels, held.labels])
    assert torch.equal(both.bincount(), DigitsSource().labels.bincount())
    with pytest.raises(InputError, match="no sample on one side"):
        digits_split(0.0)


def test_digits_without_scikit_learn(monkeypatch):
    from shardwise.data import digits

    digits._load.cache_clear()
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(InputError, match=r"pip install 'shardwise\[images\]'"):
        DigitsSource()


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return {"x": torch.tensor([index, index**2]), "y": index}


class Together(Squares):
    def __getitems__(self, indices):
        return [self[index] for index in reversed(indices)][::-1]


class Ragged(Squares):
    def __getitem__(self, index):
        return torch.ones(index + 1)


class Stream(torch.utils.data.IterableDataset):
    def __len__(self):
        return 1

    def __iter__(self):
        return iter([torch.ones(1)])


def test_datasets_become_sources():
    for dataset in (Squares(), Together()):
        source = as_source(dataset)
        assert len(source) == 6
        batch = source.read([2, 5])
        assert batch["x"].tolist() == [[2, 4], [5, 25]] and batch["y"].tolist() == [2, 5]
        assert as_source(source) is source
        parts = next(Loader(source, 0, 4, prefetch=0))
        assert samples_in(parts[0].batch) == 4
    with pytest.raises(
        InputError, match=r"Ragged: sample 1: field .* float32 \(2,\), but float32 \(1,\) in sample 0.*collate="
    ):
        as_source(Ragged()).read([0, 1])
    with pytest.raises(InputError, match=r"list: sample 1: it is None, but fields \[0\], \[1\] in sample 0"):
        as_source([(1.0, 2.0), None]).read([0, 1])
    padded = as_source(Ragged(), collate=lambda s: torch.nn.utils.rnn.pad_sequence(s, batch_first=True))
    assert padded.read([0, 2]).shape == (2, 3)
    for iterable in (iter([1]), Stream()):
        with pytest.raises(InputError, match="map-style"):
            as_source(iterable)
