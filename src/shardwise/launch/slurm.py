"""Slurm: a batch script whose step runs the ranks; two minutes before the time limit they save, and it is requeued.

    sbatch --> batch script --> srun --> ranks, which find each other by the job's id (ranks/meet)
    USR1 two minutes before the end, to the script --> srun --> ranks: they save and end with 75 --> scontrol requeue

If the scheduler preempts the job, it requeues it itself, and the same command resumes its run. `scancel` sends no USR1,
so a cancelled job is not requeued.
"""

from __future__ import annotations

from shardwise.launch.engines import LaunchEngine
from shardwise.launch.launch_job import LaunchJob
from shardwise.launch.lines import header, setup_lines

GRACE_S = 120  # seconds before the time limit at which ranks are asked to save


def _render(job: LaunchJob) -> dict[str, str]:
    return {f"{job.name}.sbatch": "\n".join([*_head(job), "", *_body(job)]) + "\n"}


def _head(job: LaunchJob) -> list[str]:
    """Returns the script's first lines: its #SBATCH options."""
    words = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.per_node}",
        *([f"--gpus-per-node={job.per_node}"] if job.accelerated else []),
        *([f"--cpus-per-task={job.cpus_per_rank}"] if job.cpus_per_rank else []),
        *([f"--time={_time(job.minutes)}"] if job.minutes else []),
        *([f"--partition={job.queue}"] if job.queue else []),
        *([f"--account={job.account}"] if job.account else []),
        f"--output={job.name}-%j.log",
        "--open-mode=append",
        *(["--requeue", f"--signal=B:USR1@{GRACE_S}"] if job.goes_on else ["--no-requeue"]),
        "--export=ALL",  # passes on the environment of sbatch without writing values here
        *job.extra,
    ]
    return ["#!/bin/bash", header(job), *(f"#SBATCH {word}" for word in words)]


def _time(minutes: int) -> str:
    days, rest = divmod(minutes, 24 * 60)
    return f"{days}-{rest // 60:02}:{rest % 60:02}:00"


def _body(job: LaunchJob) -> list[str]:
    """Returns the script's other lines: one step of all ranks, asked to save before the limit, and requeued then."""
    # block: ranks of a node are consecutive, as plans assume; after a rank's death the others have 60 s, in which
    # ranks that save can end by themselves
    step = f"srun --distribution=block --kill-on-bad-exit=0 --wait=60 {job.shell}"
    if not job.goes_on:
        return [*setup_lines(job), f"exec {step}"]
    return [
        *setup_lines(job),
        "again=0",
        f"{step} &",
        "step=$!",
        "trap 'again=1; kill -USR1 \"$step\"' USR1",
        "trap 'kill -TERM \"$step\"' TERM",
        "code=0",
        'wait "$step" || code=$?',
        'while kill -0 "$step" 2>/dev/null; do code=0; wait "$step" || code=$?; done  # a signal ends a wait early',
        # 138: it had not begun, and died of the signal itself
        'if [ "$again" = 1 ] && { [ "$code" = 75 ] || [ "$code" = 138 ]; }; then',
        '    scontrol requeue "$SLURM_JOB_ID"',
        "    sleep 60  # the job ends here",
        "fi",
        'exit "$code"',
    ]


ENGINE = LaunchEngine(
    "slurm",
    _render,
    lambda job, path: ["sbatch", path],
    takes=("minutes", "queue", "account", "extra"),
    status="squeue --name {name}",
    follow='bash -c \'until log=$(ls -t {name}-*.log 2>/dev/null | head -n 1); [ -n "$log" ]; do sleep 1; done; '
    'tail -n +1 -F "$log"\'',
    stop="scancel --name {name}",
)
