"""Finds which launcher started this process, and its rank, from environment variables (`LAUNCHERS`).

    torchrun      RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
    OpenMPI       OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
    PMI, PALS     PMI_RANK, PMI_SIZE, PALS_RANKID, PALS_LOCAL_RANKID, MPI_LOCALRANKID, ...   (MPICH, Intel MPI, Cray)
    Slurm         SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, inside a step that srun made

Launchers nest (torchrun under srun, mpirun in a batch script), so the innermost with a complete set decides: torchrun
if its run id is set, then MPI, then Slurm. Variables of one launcher must agree with each other, and RANK and
WORLD_SIZE that a user set must agree with the launcher's.

What this does not do: use an incomplete set. A rank without a size, or two variables that differ, are refused by name.
How ranks find each other without a master address: ranks/meet.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardwise.errors import InputError

MASTER = ("MASTER_ADDR", "MASTER_PORT")
TORCHRUN = ("RANK", "WORLD_SIZE", *MASTER)
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # smallest step id that Slurm gives to batch scripts and interactive shells


@dataclass(frozen=True)
class LauncherVariables:
    """The names of a launcher's environment variables. Several names of one number must agree where they are set.

    launcher                rank, size, local_rank, local_size: names of the variables with these numbers
    job                     names of variables that identify the job; the first that is set counts
    mpi                     Whether the launcher starts MPI ranks too. If not, mpi4py may see a world of one process
    """

    launcher: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    job: tuple[str, ...]
    mpi: bool = True

    @property
    def numbers(self) -> tuple[str, ...]:
        """Returns the names of all variables that hold a rank or a size."""
        return (*self.rank, *self.size, *self.local_rank, *self.local_size)


OPENMPI = LauncherVariables(
    "OpenMPI",
    rank=("OMPI_COMM_WORLD_RANK", "PMIX_RANK"),
    size=("OMPI_COMM_WORLD_SIZE",),
    local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
    local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    job=("OMPI_MCA_orte_hnp_uri", "PMIX_NAMESPACE"),
)
PMI = LauncherVariables(
    "PMI",
    rank=("PMI_RANK", "PALS_RANKID"),
    size=("PMI_SIZE",),
    local_rank=("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK", "MPI_LOCALRANKID"),
    local_size=("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE", "MPI_LOCALNRANKS"),
    job=("PALS_APID",),
)
SLURM = LauncherVariables(
    "Slurm",
    rank=("SLURM_PROCID",),
    size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    local_rank=("SLURM_LOCALID",),
    local_size=(),
    job=("SLURM_JOB_ID",),
    mpi=False,
)
LAUNCHERS = (OPENMPI, PMI, SLURM)  # without torchrun and launchers that set its variables


@dataclass(frozen=True)
class LaunchedPlace:
    """This process's place in a run that a launcher started.

    launcher                 "torchrun", "OpenMPI", "PMI", "Slurm", "mpi4py", or "shardwise"
    rank, world_size         this process's rank and the number of ranks
    local_rank, local_size   rank, and number of ranks, on this host; None if the launcher does not tell
    job                      id that no other running job has; None if the launcher gives none
    one_host                 Whether all ranks are known to be on one host
    master                   (address, port) of rank 0 if the environment gives them, else None
    names                    names of the variables of rank and size, for messages
    by                       name of another launcher that sets torchrun's variables; "" for torchrun itself
    mpi                      Whether the launcher starts MPI ranks, as in `LauncherVariables`
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None = None
    local_size: int | None = None
    job: str | None = None
    one_host: bool = False
    master: tuple[str, int] | None = None
    names: tuple[str, str] = ("RANK", "WORLD_SIZE")
    by: str = ""
    mpi: bool = True

    @property
    def named(self) -> str:
        """Returns the name of the launcher's command, such as "accelerate launch" in place of "torchrun"."""
        return self.by or self.launcher


def find(environ: Mapping[str, str]) -> LaunchedPlace | None:
    """Returns this process's place, or None if it was started alone (or as the only rank of an MPI or Slurm launch).

    Raises `InputError` that names the variables if the environment has part of a set or contradicts itself.
    """
    by_hand = [name for name in TORCHRUN if environ.get(name)]
    # torchrun's run id is set: it may run inside another launcher's job, but is the innermost
    if len(by_hand) == len(TORCHRUN) and environ.get("TORCHELASTIC_RUN_ID"):
        return _torchrun(environ)
    place = _of_launcher(environ)
    # no launcher: variables that a user set by hand must be complete
    if place is None:
        return None if _is_one_process(environ, by_hand) else _torchrun(environ)
    _check_by_hand(environ, place)
    place = replace(place, master=_master(environ))
    return place if place.world_size > 1 else None


def local_rank(environ: Mapping[str, str]) -> int | None:
    """Returns this process's rank on its host, as a launcher or shardwise itself set it; None if no variable tells it.

    Raises `InputError` as `find` does.
    """
    if environ.get("LOCAL_RANK"):
        return _number(environ, "LOCAL_RANK")
    if rank_without_size(environ):
        return None
    place = find(environ)
    return None if place is None else place.local_rank


def perhaps_hosts(place: LaunchedPlace, ranks: int) -> str:
    """Returns advice to append to a message if WORLD_SIZE may count hosts rather than ranks, else "".

    ranks   how many ranks the plan needs

    Engines with a master and workers (Kubeflow's PyTorchJob, Vertex AI) count hosts by torchrun's variables.
    """
    if place.launcher != "torchrun" or place.by or place.local_rank is not None or ranks % place.world_size:
        return ""
    return (
        "; where WORLD_SIZE and RANK count hosts, start their ranks on each of them: torchrun --nnodes $WORLD_SIZE "
        "--node-rank $RANK --master-addr $MASTER_ADDR --master-port $MASTER_PORT --nproc-per-node "
        f"{ranks // place.world_size} --no-python COMMAND"
    )


def own_device(requested: Any = None) -> Any:
    """Returns this rank's `torch.device`: as `requested`, else the accelerator of its local rank, else the CPU."""
    from shardwise.device import pick_device

    return pick_device(requested, local_rank(os.environ))


def local_size(environ: Mapping[str, str]) -> int | None:
    """Returns how many ranks are on this host, from the launcher's variables; None if no variable tells it."""
    if environ.get("LOCAL_WORLD_SIZE"):
        return _number(environ, "LOCAL_WORLD_SIZE")
    if rank_without_size(environ) or (environ.get("RANK") and not environ.get("MASTER_ADDR")):
        return None  # ranks of shardwise's own, all on this host
    place = find(environ)
    return None if place is None else place.local_size


def _is_one_process(environ: Mapping[str, str], by_hand: list[str]) -> bool:
    """Whether this is the only process: `accelerate launch` sets a master address even for one.

    by_hand   those of the `TORCHRUN` variables that are set
    """
    return not by_hand or (set(by_hand) <= set(MASTER) and bool(_with_variables_of_torchrun(environ)))


def _torchrun(environ: Mapping[str, str]) -> LaunchedPlace:
    """Returns the place from torchrun's variables; `InputError` if some are missing or contradict each other."""
    missing = [name for name in TORCHRUN if not environ.get(name)]
    if missing:
        present = ", ".join(name for name in TORCHRUN if name not in missing)
        raise InputError(
            f"the environment sets {present} but not {', '.join(missing)}; set all of {', '.join(TORCHRUN)} "
            "(torchrun does) to join a run, or none of them to run as one process"
        )
    place = LaunchedPlace(
        "torchrun",
        _number(environ, "RANK"),
        _number(environ, "WORLD_SIZE"),
        local_rank=_number(environ, "LOCAL_RANK") if environ.get("LOCAL_RANK") else None,
        local_size=_number(environ, "LOCAL_WORLD_SIZE") if environ.get("LOCAL_WORLD_SIZE") else None,
        master=_master(environ),
        by=_with_variables_of_torchrun(environ),
        mpi=False,
    )
    _check(place)
    return place


def _with_variables_of_torchrun(environ: Mapping[str, str]) -> str:
    """Returns the name of a launcher that sets torchrun's variables and some of its own; "" for torchrun itself."""
    if any(name.startswith("ACCELERATE_") for name in environ):
        return "accelerate launch"
    return "deepspeed" if "CROSS_RANK" in environ and "LOCAL_SIZE" in environ else ""


def _of_launcher(environ: Mapping[str, str]) -> LaunchedPlace | None:
    """Returns the place from MPI's variables, else from Slurm's, or None if neither is set.

    MPI comes first, since mpirun starts its helpers as Slurm steps, whose variables the ranks inherit.
    """
    open_mpi, pmi, slurm = _of_family(OPENMPI, environ), _of_family(PMI, environ), _of_slurm(environ)
    # variables of Open MPI and PMI are both set by an mpirun inside another launcher, and must agree
    if open_mpi is not None and pmi is not None:
        _same(open_mpi, pmi)
    mpi = open_mpi or pmi
    if mpi is None and slurm is None and rank_without_size(environ):
        raise InputError(
            f"the environment sets PMIX_RANK={environ['PMIX_RANK']}, but PMIx tells the number of ranks through its "
            "library alone: install mpi4py, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )
    if mpi is not None and slurm is not None and (mpi.rank, mpi.world_size) == (slurm.rank, slurm.world_size):
        return slurm  # srun itself serves PMI, and its variables tell the hosts too
    return mpi or slurm


def rank_without_size(environ: Mapping[str, str]) -> bool:
    """Whether only PMIX_RANK is set, which gives a rank but no number of ranks."""
    others = (*OPENMPI.size, *PMI.rank, *PMI.size, *SLURM.rank, *TORCHRUN[:2])
    return bool(environ.get("PMIX_RANK")) and not any(environ.get(name) for name in others)


def _of_slurm(environ: Mapping[str, str]) -> LaunchedPlace | None:
    """Returns the place from Slurm's variables inside a step of srun, else None.

    A batch script has the same variables but is one process. Raises `InputError` for a step without SLURM_PROCID.
    """
    step = environ.get("SLURM_STEP_ID", "")
    if not step:
        return None
    # a batch script or an interactive shell: one process, whatever the allocation
    if _number(environ, "SLURM_STEP_ID") >= _FIRST_SPECIAL_STEP:
        return None
    place = _of_family(SLURM, environ)
    if place is None:
        raise InputError(
            f"the environment sets SLURM_STEP_ID={step} but not SLURM_PROCID: start the ranks with srun, or unset "
            "SLURM_STEP_ID to run as one process"
        )
    one_host = environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES")) == "1"
    local_size = place.world_size if one_host else _tasks_here(environ)
    place = replace(place, local_size=local_size, one_host=one_host, job=_slurm_job(environ))
    _check(place)
    return place


def _slurm_job(environ: Mapping[str, str]) -> str | None:
    if not environ.get("SLURM_JOB_ID"):
        return None
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return "/".join(environ.get(name, "") for name in names)


def _tasks_here(environ: Mapping[str, str]) -> int | None:
    """Returns this node's number of ranks from SLURM_STEP_TASKS_PER_NODE, such as "4(x3),2"; None if not readable."""
    counts: list[int] = []
    for piece in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", piece)
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    node = environ.get("SLURM_NODEID", "")
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else None


def _of_family(family: LauncherVariables, environ: Mapping[str, str]) -> LaunchedPlace | None:
    """Returns the place from one launcher's variables, or None if none is set; `InputError` if only some are."""
    kinds = {kind: getattr(family, kind) for kind in ("rank", "size", "local_rank", "local_size")}
    named = {kind: [name for name in names if environ.get(name)] for kind, names in kinds.items()}
    if family is OPENMPI and named["rank"] == ["PMIX_RANK"] and not named["size"]:
        return None  # PMIx alone gives no size; srun's variables do, or the caller refuses
    # the caller refuses a step without a rank, since its message names the step
    if family is SLURM and not named["rank"]:
        return None
    if not any(named.values()):
        return None
    for kind in ("rank", "size"):
        if not named[kind]:
            present = ", ".join(name for names in named.values() for name in names)
            raise InputError(
                f"the environment sets {present} but none of {', '.join(kinds[kind])}: this is part of what "
                f"{family.launcher} sets; start the ranks with its launcher, or unset them to run as one process"
            )
    numbers = {kind: _agreed(environ, names) for kind, names in named.items() if family is not SLURM or kind != "size"}
    if family is SLURM:  # the step's own number; SLURM_NTASKS may be that of the allocation
        numbers["size"] = _number(environ, named["size"][0])
    rank, size = numbers["rank"], numbers["size"]
    assert rank is not None and size is not None
    place = LaunchedPlace(
        launcher=family.launcher,
        rank=rank,
        world_size=size,
        local_rank=numbers["local_rank"],
        local_size=numbers["local_size"],
        job=_job(family, environ),
        one_host=numbers["local_size"] == size,
        names=(named["rank"][0], named["size"][0]),
        mpi=family.mpi,
    )
    _check(place)
    return place


def _job(family: LauncherVariables, environ: Mapping[str, str]) -> str | None:
    found = next((environ[name] for name in family.job if environ.get(name)), None)
    return found or (_slurm_job(environ) if family is PMI else None)


def _agreed(environ: Mapping[str, str], names: list[str]) -> int | None:
    """Returns the number in all variables of `names`, None for an empty list; `InputError` if they differ."""
    if not names:
        return None
    first = _number(environ, names[0])
    for name in names[1:]:
        if _number(environ, name) != first:
            raise InputError(
                f"the environment contradicts itself: {names[0]}={first} but {name}={environ[name]}; unset the one "
                "that is left over from another launch"
            )
    return first


def _same(first: LaunchedPlace, other: LaunchedPlace) -> None:
    """Raises `InputError` if two launchers' variables give different ranks or sizes."""
    if (first.rank, first.world_size) != (other.rank, other.world_size):
        raise InputError(
            f"the environment contradicts itself: {_shown(first)} but {_shown(other)}; one of them is left over from "
            "another launch: unset it"
        )


def _shown(place: LaunchedPlace) -> str:
    """Returns a text of a place's rank and size with the names of their variables, for a message."""
    rank, size = place.names
    return f"{rank}={place.rank}, {size}={place.world_size}"


def _check_by_hand(environ: Mapping[str, str], place: LaunchedPlace) -> None:
    """Raises `InputError` if RANK or WORLD_SIZE is set and differs from the launcher's number."""
    for name, own, its in zip(("RANK", "WORLD_SIZE"), (place.rank, place.world_size), place.names, strict=True):
        if environ.get(name) and _number(environ, name) != own:
            raise InputError(
                f"the environment contradicts itself: {name}={environ[name]} but {its}={own} ({place.launcher}); "
                f"unset {name}, which {place.launcher} does not need"
            )


def _master(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Returns (MASTER_ADDR, MASTER_PORT), or None if neither is set; `InputError` if only one is."""
    address, port = (environ.get(name, "") for name in MASTER)
    if not address and not port:
        return None
    # one alone is a mistake, since the other would have to be guessed
    if not address or not port:
        present, missing = MASTER if address else MASTER[::-1]
        raise InputError(
            f"the environment sets {present} but not {missing}: set both, or neither, and the ranks agree on an "
            "address by themselves"
        )
    return address, _number(environ, "MASTER_PORT")


def _check(place: LaunchedPlace) -> None:
    """Raises `InputError` if rank, local rank and sizes of a place contradict each other."""
    rank, size = place.names
    if place.rank >= place.world_size:
        raise InputError(
            f"the environment sets {rank}={place.rank}, which a {size} of {place.world_size} does not have"
        )
    if place.local_size is not None and place.local_size > place.world_size:
        raise InputError(
            f"the environment contradicts itself: {place.local_size} ranks on this host, but {size}={place.world_size}"
        )
    if place.local_rank is not None and place.local_size is not None and place.local_rank >= place.local_size:
        raise InputError(
            f"the environment contradicts itself: local rank {place.local_rank} of {place.local_size} ranks on this "
            f"host ({place.launcher})"
        )


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if not text.isdecimal():
        raise InputError(f"the environment variable {name} is '{text}', not a whole number")
    return int(text)
