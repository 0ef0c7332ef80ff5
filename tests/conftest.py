"""Fixtures and settings that every test shares."""

from __future__ import annotations

import gc
import os
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from shardwise.cli.waiting import OBJECTS
from shardwise.ranks import RankPool, process

# one torch thread in every process that tests start, as in the pool's ranks: of a launched rank of its own, threads
# that wait for each other, spinning, took ten times the CPU time of its tiny operations
os.environ.setdefault("OMP_NUM_THREADS", "1")

# as commands do (cli/waiting): else a sixth of the time of imports goes into looking for garbage among them
gc.set_threshold(OBJECTS)

# tests start some hundred processes, and each would compile every module again that it imports
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# what ranks of most tests import, once in the server from which they are forked instead of in each of them
process.PRELOAD += ["shardwise.training.loop", "shardwise.proof.rank", "transformers.models.llama.modeling_llama"]

pytest.register_assert_rewrite("changed_scripts", "small_scripts")

# the same examples on every machine, and no time limit for one example: a loaded machine is not a failure
settings.register_profile("steady", derandomize=True, deadline=None)
# for hunting by hand: HYPOTHESIS_PROFILE=search
settings.register_profile("search", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Proofs that name no device can be run on an accelerator."""
    parser.addoption("--proofs-on", default="cpu", help="the type of the accelerator that proofs run on")


def pytest_configure(config: pytest.Config) -> None:
    """Tests run on the CPU, on machines with a GPU too; `-m gpu` are those that want one, `--proofs-on cuda` may."""
    device = config.option.proofs_on
    if device != "cpu":
        from shardwise.proof.parity import verify

        assert verify.__kwdefaults__ is not None
        verify.__kwdefaults__["device"] = device
    elif config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Skip, in sight, proofs of tasks that make tensors on the CPU, and are told so on an accelerator."""
    report = yield
    told = str(call.excinfo.value) if call.excinfo is not None else ""
    if item.config.option.proofs_on != "cpu" and "On the CPU it runs" in told:
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, "Skipped: its task makes tensors on the CPU")
    return report


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Ranks for the whole session: `pool.run(function, world_size, *args)`."""
    with RankPool() as ranks:
        yield ranks


@pytest.hookimpl(tryfirst=True)  # before cases are chosen by marks and names
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what `long_cases.toml` leaves to the long tests; skip what needs a GPU, in sight, where there is none."""
    leave_long_cases(config, items)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and this machine has none"))


def leave_long_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Raises `UsageError` for a name in the file that no case of a file which was collected whole has."""
    groups = tomllib.loads(Path(__file__).with_name("long_cases.toml").read_text(encoding="utf-8"))["left"]
    wanted = {case for group in groups for case in group["cases"]}
    found = {case_of(item.nodeid): item for item in items}
    for name in wanted & found.keys():
        found[name].add_marker(pytest.mark.long)
    files = {name.split("::")[0] for name in found} if not any("::" in arg for arg in config.args) else set()
    if lost := [name for name in sorted(wanted - found.keys()) if name.split("::")[0] in files]:
        raise pytest.UsageError(f"tests/long_cases.toml names {lost[0]} (and {len(lost) - 1} more), which is no case")


def case_of(nodeid: str) -> str:
    """Without the folder: names of files are unique."""
    path, separator, case = nodeid.partition("::")
    return f"{Path(path).name}{separator}{case}"


def pytest_collection_finish() -> None:
    """Set aside what was imported, as ranks do: each full collection would walk a hundred megabytes of it again."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup() -> None:
    """One torch thread in this process, as in the ranks: threads of tiny operations wait for each other, spinning."""
    torch = sys.modules.get("torch")  # files that need none are not made to wait for its import
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)
