"""PBS: a batch script that starts torchrun on each host; before the time limit ranks save, and it submits itself again.

    qsub --> batch script on the first host --> agent here, and pbs_tmrsh to each other host
    two minutes before the end --> the agent here --> its ranks; all ranks save and end with 75 --> qsub again

Users may not requeue a job under PBS (`qrerun` is for operators), so the script submits itself again.
"""

from __future__ import annotations

from shardwise.launch.engines import LaunchEngine
from shardwise.launch.launch_job import LaunchJob
from shardwise.launch.lines import AGENT, header, host_script, wait_for_all

GRACE_S = 120  # seconds before the time limit at which ranks are asked to save


def _render(job: LaunchJob) -> dict[str, str]:
    host = host_script(job, AGENT, ('cd "$(dirname "$0")" || exit 2',))
    return {f"{job.name}.pbs": "\n".join([*_head(job), "", *_body(job)]) + "\n", f"{job.name}-host.sh": host}


def _head(job: LaunchJob) -> list[str]:
    """Returns the script's first lines: its #PBS options."""
    cpus = job.per_node * (job.cpus_per_rank or 1)
    gpus = f":ngpus={job.per_node}" if job.accelerated else ""
    words = [
        f"-N {job.name[:15]}",  # some versions refuse longer names
        f"-l select={job.nodes}:ncpus={cpus}{gpus}:mpiprocs={job.per_node}",
        "-l place=scatter",
        *([f"-l walltime={job.minutes // 60:02}:{job.minutes % 60:02}:00"] if job.minutes else []),
        *([f"-q {job.queue}"] if job.queue else []),
        *([f"-A {job.account}"] if job.account else []),
        *([f"-v {','.join(job.passed)}"] if job.passed else []),  # qsub passes on the values of its own environment
        "-j oe",
        "-r y" if job.goes_on else "-r n",
        *job.extra,
    ]
    return ["#!/bin/bash", header(job), *(f"#PBS {word}" for word in words)]


def _body(job: LaunchJob) -> list[str]:
    """Returns the script's other lines: they start ranks on each host, ask them to save in time, and submit again."""
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
        # the signal goes to the first host's ranks only, since all ranks stop if one was asked to
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
