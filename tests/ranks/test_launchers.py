"""Every launcher's environment: this process's place is found, half a set is refused, and ranks meet without a port."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.errors import InputError, RunError
from shardwise.ranks import RankPool, launchers, mpi
from shardwise.ranks.launchers import LaunchedPlace, find
from shardwise.ranks.meet import Address, _file, meet

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node0",
            "MASTER_PORT": "43210", "TORCHELASTIC_RUN_ID": "none"}  # fmt: skip
OPENMPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
           "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_RANK": "3", "PMIX_NAMESPACE": "prterun-node0-77@1"}  # fmt: skip
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "9"}
PALS = {"PMI_RANK": "9", "PMI_SIZE": "16", "PALS_RANKID": "9", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "4",
        "PALS_APID": "a1b2"}  # fmt: skip
SRUN = {"SLURM_PROCID": "4", "SLURM_STEP_NUM_TASKS": "5", "SLURM_NTASKS": "5", "SLURM_LOCALID": "1",
        "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "3", "SLURM_NODEID": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}  # fmt: skip
SRUN_ONE_HOST = SRUN | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_NODEID": "0"}
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "12"}


def test_a_place_where_nobody_listens_is_told_in_time():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    place = LaunchedPlace("torchrun", 1, 2, master=("127.0.0.1", port))
    with pytest.raises(
        RunError, match=rf"rank 1 cannot reach MASTER_ADDR=127.0.0.1 MASTER_PORT={port}: nobody listened"
    ):
        meet(place, timeout_s=0.2)


def numbers(place: LaunchedPlace | None) -> tuple | None:
    if place is None:
        return None
    return place.launcher, place.rank, place.world_size, place.local_rank, place.local_size, place.one_host


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (TORCHRUN, ("torchrun", 5, 8, 1, 4, False)),
        (OPENMPI, ("OpenMPI", 3, 4, 1, 2, False)),
        (HYDRA, ("PMI", 1, 2, 1, 2, True)),
        (PALS, ("PMI", 9, 16, 1, 4, False)),
        (SRUN | {"SLURM_LOCALID": "0"}, ("Slurm", 4, 5, 0, 1, False)),
        (SRUN_ONE_HOST, ("Slurm", 4, 5, 1, 5, True)),
        # a batch script, and the shell of salloc, are one process whatever they were promised
        (BATCH, None),
        (BATCH | {"SLURM_STEP_ID": "4294967291"}, None),
        (BATCH | {"SLURM_STEP_ID": "4294967290"}, None),
        # the innermost decides: torchrun in a step, mpirun whose helpers are steps, srun that serves PMI
        (SRUN_ONE_HOST | TORCHRUN, ("torchrun", 5, 8, 1, 4, False)),
        (SRUN_ONE_HOST | OPENMPI, ("OpenMPI", 3, 4, 1, 2, False)),
        (SRUN_ONE_HOST | {"PMI_RANK": "4", "PMI_SIZE": "5"}, ("Slurm", 4, 5, 1, 5, True)),
        (SRUN_ONE_HOST | {"PMIX_RANK": "4", "PMIX_NAMESPACE": "slurm.pmix.12.0"}, ("Slurm", 4, 5, 1, 5, True)),
        # an only rank starts the plan's ranks itself
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, None),
        # exported for other programs, and in agreement
        (OPENMPI | {"RANK": "3", "WORLD_SIZE": "4"}, ("OpenMPI", 3, 4, 1, 2, False)),
    ],
)
def test_the_place_is_found(environ: dict[str, str], expected: tuple | None) -> None:
    assert numbers(find(environ)) == expected


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK, WORLD_SIZE but not MASTER_ADDR, MASTER_PORT"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_RANK but none of OMPI_COMM_WORLD_SIZE"),
        ({"PMI_SIZE": "4"}, "PMI_SIZE but none of PMI_RANK, PALS_RANKID"),
        ({"PALS_LOCAL_RANKID": "0"}, "PALS_LOCAL_RANKID but none of PMI_RANK"),
        ({"SLURM_STEP_ID": "0"}, "SLURM_STEP_ID=0 but not SLURM_PROCID"),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}, "none of SLURM_STEP_NUM_TASKS, SLURM_NTASKS"),
        ({"PMIX_RANK": "1"}, "PMIX_RANK=1, but .* mpi4py"),
        ({"PMI_RANK": "2", "PMI_SIZE": "2"}, "PMI_RANK=2, which a PMI_SIZE of 2"),
        (PALS | {"PALS_RANKID": "8"}, "contradicts itself: PMI_RANK=9 but PALS_RANKID=8"),
        (OPENMPI | {"PMI_RANK": "0", "PMI_SIZE": "2"}, "OMPI_COMM_WORLD_RANK=3, .* but PMI_RANK=0, PMI_SIZE=2"),
        (OPENMPI | {"RANK": "0", "WORLD_SIZE": "4"}, "RANK=0 but OMPI_COMM_WORLD_RANK=3"),
        (SRUN | {"SLURM_LOCALID": "0", "WORLD_SIZE": "8"}, "WORLD_SIZE=8 but SLURM_STEP_NUM_TASKS=5"),
        (OPENMPI | {"MASTER_ADDR": "node0"}, "MASTER_ADDR but not MASTER_PORT"),
        (HYDRA | {"MPI_LOCALNRANKS": "3"}, "3 ranks on this host, but PMI_SIZE=2"),
        (SRUN, "local rank 1 of 1 ranks"),
        ({"PMI_RANK": "first", "PMI_SIZE": "2"}, "PMI_RANK is 'first'"),
    ],
)
def test_half_a_set_and_contradictions_are_refused_by_name(environ: dict[str, str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        find(environ)


def test_ranks_that_may_be_hosts_are_told_how_each_starts_its_own() -> None:
    hosts = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    place = find(hosts)
    assert place is not None and "--nproc-per-node 8 " in launchers.perhaps_hosts(place, 16)
    assert not launchers.perhaps_hosts(place, 3)
    of_torchrun = find(hosts | {"LOCAL_RANK": "0"})
    assert of_torchrun is not None and not launchers.perhaps_hosts(of_torchrun, 16)


def test_a_master_that_somebody_set_is_taken() -> None:
    place = find(OPENMPI | {"MASTER_ADDR": "node0", "MASTER_PORT": "4000"})
    assert place is not None and place.master == ("node0", 4000)


class AloneInMpi:
    """mpi4py's COMM_WORLD in a process that its launcher gave no MPI."""

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("environ", "believed"), [(TORCHRUN, True), (SRUN_ONE_HOST, True), (OPENMPI, False), (PALS, False)]
)
def test_a_world_of_one_in_mpi_is_believed_of_launchers_without_mpi(
    environ: dict[str, str], believed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpi, "world_communicator", AloneInMpi)
    monkeypatch.setattr(mpi.os, "environ", environ)
    if believed:
        assert mpi.here() == find(environ)
        return
    with pytest.raises(InputError, match="another MPI than the launcher's"):
        mpi.here()


# --- the meeting, with threads for ranks: it knows nothing of processes


def meeting(places: list[LaunchedPlace], timeout_s: float = 10.0) -> list:
    """What each rank's meeting came to: a `Met`, or the error."""
    results: list = [None] * len(places)

    def one(slot: int, place: LaunchedPlace) -> None:
        try:
            results[slot] = meet(place, timeout_s)
        except Exception as error:
            results[slot] = error

    threads = [threading.Thread(target=one, args=pair, daemon=True) for pair in enumerate(places)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s + 20)
    assert not any(thread.is_alive() for thread in threads)
    return results


def places(ranks: list[int], size: int, job: str, **changes) -> list[LaunchedPlace]:
    return [LaunchedPlace("OpenMPI", rank, size, job=job, names=("R", "S"), **changes) for rank in ranks]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return f"job-of-{tmp_path}"


@pytest.mark.parametrize("one_host", [True, False])
def test_ranks_meet_and_leave_no_file(job: str, one_host: bool, tmp_path: Path) -> None:
    met = meeting(places([2, 0, 1], 3, job, one_host=one_host))
    assert [each.local_rank for each in met] == [2, 0, 1]
    met[1].store.set("word", "heard")
    assert met[0].store.get("word") == b"heard"
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_threads_are_shared_by_ranks_on_the_same_cpus(job: str) -> None:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert [each.threads for each in meeting(places([0, 1], 2, job))] == [max(1, usable // 2)] * 2


def test_a_missing_rank_is_named_everywhere(job: str) -> None:
    for error in meeting(places([0, 2], 3, job), timeout_s=1.5):
        assert isinstance(error, RunError) and "rank 1 of 3" in str(error)


def test_a_rank_without_rank_0_says_where_it_looked(job: str) -> None:
    (error,) = meeting(places([1], 2, job), timeout_s=0.5)
    assert isinstance(error, RunError) and ".shardwise-openmpi-" in str(error) and "MASTER_ADDR" in str(error)


def test_two_processes_of_one_rank_are_refused(job: str) -> None:
    results = meeting(places([0, 1, 1], 3, job), timeout_s=2.0)
    assert any("two processes say that they are rank 1" in str(error) for error in results)


def test_a_file_left_behind_is_passed_over(job: str) -> None:
    """Its port is closed, or somebody else's store answers there."""
    import torch.distributed as dist

    other = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    other.set("token", "of another job")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    for stale in (port, other.port):
        pair = places([0, 1], 2, job)
        _file(pair[0]).write_text(Address(("127.0.0.1",), stale, "token").pack())
        late = [None, None]

        def first(pair=pair, late=late) -> None:
            time.sleep(0.3)  # rank 1 has met the old file by then
            late[0] = meet(pair[0], 10.0)

        thread = threading.Thread(target=first, daemon=True)
        thread.start()
        late[1] = meet(pair[1], 10.0)
        thread.join(20)
        assert None not in late


def test_a_launcher_without_a_job_id_says_what_to_do() -> None:
    with pytest.raises(InputError, match="MASTER_ADDR and MASTER_PORT"):
        meet(LaunchedPlace("PMI", 0, 2), 1.0)


def test_a_master_address_is_used_as_it_is(job: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    assert not any(isinstance(each, Exception) for each in meeting(places([0, 1], 2, job, master=("127.0.0.1", port))))


def test_a_master_port_in_use_is_told_with_what_to_do() -> None:
    """Where the environment alone tells the place, as a launcher of one's own sets it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        told = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        joining = "from shardwise.ranks import join; join()"
        command = [sys.executable, "-c", joining]
        done = subprocess.run(command, env={**os.environ, **told}, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert f"MASTER_PORT={port}" in done.stderr and "Give all ranks another MASTER_PORT" in done.stderr


def own_place() -> tuple | None:
    from shardwise.ranks import here

    return numbers(here())


def test_ranks_of_our_own_have_their_place(pool: RankPool) -> None:
    assert pool.run(own_place, 2) == [("shardwise", 0, 2, 0, 2, True), ("shardwise", 1, 2, 1, 2, True)]


# --- the real ones


SHARDWISE = str(Path(sys.executable).with_name("shardwise"))
RUN = [SHARDWISE, "train", "digits", "--plan", "dp_shard=2,zero=3", "--steps", "2"]
NAMES = {name for family in launchers.LAUNCHERS for name in (*family.numbers, *family.job)}
NAMES |= {*launchers.TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE"}


def clean_environment() -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if name not in NAMES}
    return found | {"OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def train(folder: Path, words: list[str], environ: dict[str, str] | None = None) -> str:
    """The sha256 of the weights that the same command gives under a launcher."""
    command = [*words, *RUN, "--set", f"train.out={folder}", "--json"]
    ran = subprocess.run(command, env=environ or clean_environment(), capture_output=True, text=True, timeout=180,
                         cwd=folder)  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    answer = json.loads(ran.stdout)  # one object, whatever the ranks
    assert answer["world_size"] == 2 and answer["error"] is None
    assert not list(folder.glob(".shardwise*"))
    return hashlib.sha256(Path(answer["weights"]).read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    return train(tmp_path_factory.mktemp("plain"), [])


def needs(*programs: str) -> str:
    """The first program's path; skips where one is not installed."""
    for program in programs:
        if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") is None:
            pytest.skip(f"needs {program}, which is not installed here")
    return programs[0]


def one_of(*programs: str) -> str:
    found = next((program for program in programs if shutil.which(program)), None)
    return found or pytest.skip(f"needs {' or '.join(programs)}, which is not installed here")


@pytest.fixture(scope="module")
def openmpi() -> str:
    return needs("mpirun.openmpi")


# what is not installed is asked for first: nothing is trained to compare with where the test is skipped
def test_under_openmpi(openmpi: str, plain: str, tmp_path: Path) -> None:
    assert train(tmp_path, [openmpi, "--oversubscribe", "-n", "2"]) == plain


@pytest.mark.long
def test_under_mpich(plain: str, tmp_path: Path) -> None:
    mpirun = one_of("mpirun.mpich", "mpiexec.hydra")
    assert train(tmp_path, [mpirun, "-n", "2"]) == plain


@pytest.mark.long
def test_under_torchrun(plain: str, tmp_path: Path) -> None:
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    assert train(tmp_path, [torchrun, "--standalone", "--nproc-per-node", "2", "--no-python"]) == plain


@pytest.mark.long
def test_a_forecast_is_beside_the_measured_step_under_a_launcher(tmp_path: Path) -> None:
    from dataclasses import replace

    from shardwise.cluster import Cluster

    mpirun = one_of("mpirun.openmpi", "mpirun.mpich")
    base = Cluster.parse("2 l40s")
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(replace(base, device=replace(base.device, kind="cpu", table="")).to_toml())
    many = ["--oversubscribe"] if "openmpi" in mpirun else []
    command = [mpirun, *many, "-n", "2", *RUN[:-1], "4", "--cluster", str(cluster), "--json"]
    ran = subprocess.run(command, env=clean_environment(), cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert ran.returncode == 0, ran.stderr
    answer = json.loads(ran.stdout)
    assert all(value > 0 for value in answer["forecast"]["beside"]["step"])
    assert json.loads((tmp_path / answer["folder"] / "summary.json").read_text())["forecast"] == answer["forecast"]


MPI4PY = """
import sys
from mpi4py import MPI
from shardwise.ranks import here, join
place, (rank, size) = here(), join()
assert (rank, size) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) == (place.rank, 2)
import torch, torch.distributed as dist
one = torch.ones(1); dist.all_reduce(one); assert one.item() == 2
dist.destroy_process_group()
"""


@pytest.mark.long
def test_mpi4py_carries_the_address(tmp_path: Path) -> None:
    mpirun = needs("mpirun.openmpi")
    pytest.importorskip("mpi4py", reason="needs mpi4py, which is not installed here")
    environ = clean_environment() | {"MPI4PY_LIBMPI": "libmpi.so.40"}
    ran = subprocess.run([mpirun, "--oversubscribe", "-n", "2", sys.executable, "-c", MPI4PY],
                         env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=120)  # fmt: skip
    assert ran.returncode == 0, ran.stderr


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a Slurm of one machine: the one that is here, or one started for these tests."""
    needs("srun", "slurmctld", "slurmd", "munge")
    if subprocess.run(["sinfo", "-h"], capture_output=True, timeout=30).returncode == 0:
        yield clean_environment()
        return
    if os.geteuid() != 0:
        pytest.skip("needs a running Slurm, or root to start one of one machine")
    if subprocess.run(["munge", "-n"], capture_output=True, timeout=30).returncode != 0:
        pytest.skip("needs a running munged, by which Slurm's parts know each other")
    folder = tmp_path_factory.mktemp("slurm")
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        ports = one.getsockname()[1], two.getsockname()[1]
    conf = folder / "slurm.conf"
    conf.write_text(slurm_conf(folder, *ports))
    environ = clean_environment() | {"SLURM_CONF": str(conf)}
    daemons = []
    try:
        for program in ("slurmctld", "slurmd"):
            path = shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin")
            with open(folder / f"{program}.out", "wb") as out:
                daemons.append(subprocess.Popen([str(path), "-D"], env=environ, stdout=out, stderr=out))
        until = time.monotonic() + 30
        while subprocess.run(["sinfo", "-h", "-t", "idle", "-o", "%n"], env=environ, capture_output=True,
                             text=True).stdout.strip() == "":  # fmt: skip
            if time.monotonic() > until:
                pytest.skip("Slurm's daemons do not come up here: " + (folder / "slurmctld.out").read_text()[-300:])
            time.sleep(0.3)
        yield environ
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(20)


def slurm_conf(folder: Path, control: int, node: int) -> str:
    host = socket.gethostname().split(".")[0]
    return f"""
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
StateSaveLocation={folder}
SlurmdSpoolDir={folder}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldPort={control}
SlurmdPort={node}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES State=UP OverSubscribe=FORCE:4
"""


def test_under_srun(slurm: dict[str, str], plain: str, tmp_path: Path) -> None:
    assert train(tmp_path, ["srun", "--overcommit", "-n", "2"], slurm) == plain


@pytest.mark.long
def test_under_srun_that_serves_pmi(slurm: dict[str, str], plain: str, tmp_path: Path) -> None:
    assert train(tmp_path, ["srun", "--overcommit", "--mpi=pmi2", "-n", "2"], slurm) == plain


@pytest.mark.long
def test_another_number_of_ranks_than_the_plan_needs(tmp_path: Path) -> None:
    mpirun = one_of("mpirun.mpich", "mpiexec.hydra")
    ran = subprocess.run([mpirun, "-n", "3", *RUN], env=clean_environment(), capture_output=True, text=True, timeout=90,
                         cwd=tmp_path)  # fmt: skip
    assert ran.returncode == 2
    assert "PMI started 3 rank(s), but plan dp_shard=2,zero=3 needs 2" in ran.stderr
