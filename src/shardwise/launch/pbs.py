"""PBS: a batch script that starts torchrun on each host of the job; saved and submitted again before its time is over.

    qsub --> batch script on the first host --> agent here, and pbs_tmrsh to each other host
    two minutes before the end --> the agent here --> its ranks; all ranks save and end with 75 --> qsub again

A user may not requeue a job under PBS (`qrerun` is the operator's), so the script submits itself once more.
"""

from __future__ import annotations

from shardwise.launch.engines import LaunchEngine
from shardwise.launch.launch_job import LaunchJob
from shardwise.launch.lines import AGENT, header, host_script, wait_for_all

GRACE_S = 120


def _render(job: LaunchJob) -> dict[str, str]:
    host = host_script(job, AGENT, ('cd "$(dirname "$0")" || exit 2',))
    return {f"{job.name}.pbs": "\n".join([*_head(job), "", *_body(job)]) + "\n", f"{job.name}-host.sh": host}


def _head(job: LaunchJob) -> list[str]:
    """Returns the script's head: what the job asks PBS for."""
    cpus = job.per_node * (job.cpus_per_rank or 1)
    gpus = f":ngpus={job.per_node}" if job.accelerated else ""
    words = [
        f"-N {job.name[:15]}",  # more, some versions refuse
        f"-l select={job.nodes}:ncpus={cpus}{gpus}:mpiprocs={job.per_node}",
        "-l place=scatter",
        *([f"-l walltime={job.minutes // 60:02}:{job.minutes % 60:02}:00"] if job.minutes else []),
        *([f"-q {job.queue}"] if job.queue else []),
        *([f"-A {job.account}"] if job.account else []),
        *([f"-v {','.join(job.passed)}"] if job.passed else []),  # with the values that they have at qsub
        "-j oe",
        "-r y" if job.goes_on else "-r n",
        *job.extra,
    ]
    return ["#!/bin/bash", header(job), *(f"#PBS {word}" for word in words)]


def _body(job: LaunchJob) -> list[str]:
    """Returns the script's body: ranks started on each host, told to save in time, submitted again if they did."""
    timed = job.goes_on and job.minutes is not None
    lines = [
        'cd "$PBS_O_WORKDIR" || exit 2',
        "mapfile -t hosts < <(awk '!seen[$0]++' \"$PBS_NODEFILE\")",
        "ranks=()",
        f"for node in $(seq 1 {job.nodes - 1}); do",
        f'    pbs_tmrsh "${{hosts[$node]}}" bash "$PWD/{job.name}-host.sh" "$node" "${{hosts[0]}}" &',
        "    ranks+=($!)",
        "done",
        f'bash "$PWD/{job.name}-host.sh" 0 "${{hosts[0]}}" &',
        "first=$!",
        'ranks+=("$first")',
        # only the first host's ranks are told: all ranks agree to stop where one was asked to
        *(["again=0", "trap 'again=1; kill -USR1 \"$first\"' USR1"] if job.goes_on else []),
        "trap 'kill -TERM \"$first\"' TERM",
    ]
    if timed:
        assert job.minutes is not None
        lines += [f"(sleep {max(1, job.minutes * 60 - GRACE_S)}; kill -USR1 $$) &", "timer=$!"]
    lines += [*wait_for_all(), *(['kill "$timer" 2>/dev/null'] if timed else [])]
    if job.goes_on:
        lines.append(f'if [ "$again" = 1 ] && [ "$code" = 75 ]; then qsub {job.name}.pbs; fi')
    return [*lines, 'exit "$code"']


ENGINE = LaunchEngine(
    "pbs",
    _render,
    lambda job, path: ["qsub", path],
    takes=("minutes", "queue", "account", "extra"),
    status="bash -c 'qstat $(qselect -N {name})'",
    stop="bash -c 'qdel $(qselect -N {name})'",
)
