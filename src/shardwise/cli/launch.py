"""The command `launch`: makes, writes and submits the job files of a target and a plan (launch/)."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardwise.cli.answer import Answer
from shardwise.cli.options import Number, WholeNumber, common, given, given_plan, keep_others
from shardwise.cli.prove import is_script
from shardwise.cli.waiting import waiting
from shardwise.errors import InputError, ShardwiseError

if TYPE_CHECKING:
    from shardwise.config import Effective
    from shardwise.layout import Plan

FOLDER = "launch"  # default folder of the files
MOUNTED = "/runs"  # default folder of runs if there is a --volume


@click.command()
@click.argument("target", metavar="CONFIG.toml | MODULE:TASK | SCRIPT.py")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGS]")
@click.option(
    "--on", required=True, callback=given, metavar="ENGINE", help="slurm, pbs, ray, k8s, sky, torchrun, hosts."
)
@click.option("--plan", callback=given_plan, help="How to spread it; by default the configuration's plan.")
@click.option("--nodes", type=WholeNumber(min=1), help="Hosts; by default as many as the plan's ranks fill.")
@click.option(
    "--per-node", type=WholeNumber(min=1), help="Ranks of a host: its devices. By default the cluster's, or 8."
)
@click.option("--cluster", callback=given, help='"4x8 h100-sxm-80gb, ib-400" or a .toml file: links, hours and price.')
@click.option("--price", type=Number(min=0), default=0.0, help="Price of one device for an hour.")
@click.option("--name", callback=given, help="Of the job; its runs lie in FOLDER/NAME, where it goes on.")
@click.option("--folder", callback=given, help="Of runs and checkpoints, which the hosts share.  [default: runs]")
@click.option("--cpu", is_flag=True, help="The ranks are on CPUs: no accelerators are asked for.")
@click.option("--cpus-per-rank", type=WholeNumber(min=1), help="CPUs that the engine is asked for, for each rank.")
@click.option("--time", "minutes", callback=given, metavar="TIME", help="Time limit: 12h, 90m.")
@click.option("--partition", "queue", callback=given, help="Of Slurm; a queue of PBS.")
@click.option("--account", callback=given, help="Who pays, as the engine calls it.")
@click.option("--image", callback=given, help="Of containers (k8s, sky).")
@click.option("--volume", callback=given, help="What holds FOLDER: a claim (k8s), a volume or bucket (sky).")
@click.option("--accelerator", callback=given, help="The engine's own name of the device (k8s, sky).")
@click.option("--host", "hosts", multiple=True, callback=lambda c, p, v: v, help="A host, for --on hosts; one each.")
@click.option(
    "--port", type=WholeNumber(min=1, max=65535), default=29500, show_default=True, help="On which hosts meet."
)
@click.option("--setup", callback=given, help="A line of shell before the ranks. By default this environment's.")
@click.option("--env", "variables", multiple=True, metavar="NAME[=VALUE]", help="Hand a variable on; secrets by NAME.")
@click.option("--extra", multiple=True, metavar="WORDS", help="A line of the engine as it is (slurm, pbs).")
@click.option("-o", "--output", callback=given, default=FOLDER, show_default=True, help="Folder of the files.")
@click.option("--dry-run", is_flag=True, help="Print the files and end; nothing is written.")
@click.option("--yes", is_flag=True, help="Submit without a question.")
@click.option("--status", "ask", flag_value="status", help="Submit nothing: where the job of this name stands.")
@click.option("--follow", "ask", flag_value="follow", help="The same: what its ranks say; with --yes, once submitted.")
@click.option("--stop", "ask", flag_value="stop", help="The same: end it for good.")
@common
@click.pass_obj
def launch(answer: Answer, target: str, arguments: tuple[str, ...], **words: Any) -> None:
    """From a plan to a job: the complete files that an engine takes, with the map of ranks, hours and price.

    \b
    shardwise launch digits --plan dp_shard=16,zero=3 --on slurm --time 12h --dry-run
    shardwise launch train.py --plan dp_shard=2 --on hosts --host node0 --host node1 -- --lr 1e-3

    Without --dry-run the files are written, and submitted by the engine's own client after a question, or --yes.
    --status, --follow and --stop ask that client about the job of the same target or --name.
    A run that is stopped saves, and goes on when the job starts again.
    """
    from shardwise.launch import engines
    from shardwise.launch.launch_job import job_name

    chosen = engines.engine(words["on"])
    _refuse_more_lines(words)
    # "--follow --yes" submits first and follows below; the other questions need no plan
    if words["ask"] and not (words["ask"] == "follow" and words["yes"]):
        answer.code = engines.ask(chosen, words["ask"], job_name(words["name"], target))
        return
    effective, plan = _settled(target, words["plan"])
    job, cluster = _job(target, arguments, effective, plan, words, chosen)
    files = engines.files_of(chosen, job)
    answer.fields.update(plan=str(plan), world_size=plan.world_size, files=files, nodes=job.nodes)
    if words["yes"] and words["dry_run"]:
        raise click.UsageError("--yes submits and --dry-run does not: give one of them")
    # the job takes these variables from the shell that submits it, which may be another one
    unset = [
        f"{name} is not set here: set it where the job is submitted" for name in job.passed if name not in os.environ
    ]
    lines = [
        job.what,
        *unset,
        *_map(answer, job, cluster),
        *_forecast(answer, effective, cluster, words),
        *chosen.remarks(job),
    ]
    # a program that asks for JSON without --yes gets the files' content, and nothing is written
    if words["dry_run"] or (answer.as_json and not words["yes"]):
        answer.text = "\n".join([*lines, *(f"\n--- {name}\n{text}".rstrip() for name, text in files.items())])
        return
    # check all files before the first is written
    for name in files:
        keep_others(Path(words["output"]) / name)
    paths = engines.write(files, Path(words["output"]))
    lines.append(f"written: {', '.join(map(str, paths))}")
    click.echo("\n".join(lines), err=answer.as_json)
    command = shlex.join(chosen.submit(job, str(paths[0])))
    if not words["yes"] and not _agreed(command):
        answer.text = f"not submitted; later by: {command}"
        return
    answer.code, said = engines.submit(chosen, job, paths[0])
    answer.fields.update(submitted=command, said=said)
    # "--follow --yes": follow the submitted job
    if words["ask"] and not answer.code:
        answer.code = engines.ask(chosen, words["ask"], job.name)
        return
    # the command by which the user asks about this job later, so it must have the same name
    again = shlex.join(
        ["shardwise", "launch", target, "--on", chosen.name, *(["--name", words["name"]] * bool(words["name"]))]
    )
    asked = [what for what in ("status", "follow", "stop") if getattr(chosen, what)]
    answer.text = "\n".join(
        [*([said] if said else []), *([f"later: {again} --{' | --'.join(asked)}"] if asked else [])]
    )


def _refuse_more_lines(words: dict[str, Any]) -> None:
    """Raises `InputError` for an option with a line break, except --setup (shell) and --env; `words`: all options."""
    for name, value in words.items():
        for text in value if isinstance(value, tuple) else [value]:
            if isinstance(text, str) and "\n" in text.strip() and name not in ("setup", "variables"):
                raise InputError(f"--{name} {text!r} is of several lines: give one (--setup takes lines of shell)")


def _agreed(command: str) -> bool:
    if not sys.stdin.isatty():
        raise InputError(f"nobody is here to be asked whether to submit: give --yes, or run it later: {command}")
    return click.confirm(f"submit it now ({command})?", err=True)


def _settled(target: str, plan: str | None) -> tuple[Effective | None, Plan]:
    """Returns (the target's configuration, or None for a script; the checked plan).

    plan   text of --plan; None: the configuration's

    Raises `UsageError` for a script without a plan, `InputError` for a missing file, `RefusedPlan` for a plan that does
    not run.
    """
    from shardwise.layout import Plan, check

    # for a script only --plan says how many ranks there are
    if is_script(target):
        if not Path(target).is_file():
            raise InputError(f"launch: no file {target}")
        if plan is None:
            raise click.UsageError("Missing option '--plan': how many ranks the script is for")
        parsed = Plan.parse(plan)
        check(parsed)
        return None, parsed
    from shardwise.config import Given, load

    path = target if target.endswith(".toml") else None
    # a configuration names its task; a task given by name is put into an empty one
    values = [] if path else [Given("task.name", target, "the task argument")]
    if plan is not None:
        values.append(Given("plan", plan, "--plan"))
    effective = load(path, (), values)
    check(effective.plan)
    return effective, effective.plan


def _job(
    target: str, arguments: tuple[str, ...], effective: Effective | None, plan: Plan, words: dict[str, Any], chosen: Any
) -> tuple[Any, Any]:
    """Returns (the `LaunchJob`, the cluster of --cluster or None).

    target, arguments   what is run, and a script's arguments
    effective           the target's configuration; None for a script
    words               the command's options by name
    chosen              the engine that the job is for
    """
    from shardwise.cluster import Cluster
    from shardwise.costs.units import duration
    from shardwise.launch.launch_job import LaunchJob, grid, job_name, variables_of

    cluster = Cluster.parse(words["cluster"]) if words["cluster"] else None
    hosts = tuple(words["hosts"])
    nodes, per_node = grid(plan, words["nodes"] or len(hosts) or None, words["per_node"], cluster)
    if hosts and len(hosts) != nodes:
        raise InputError(f"{len(hosts)} host(s) are named, and the job has {nodes}: give --host once for each")
    name = job_name(words["name"], target)
    folder = words["folder"] or (MOUNTED if words["volume"] else "runs")
    command = _command(target, arguments, effective, plan, f"{folder}/{name}")
    limit = None if words["minutes"] is None else max(1, round(duration(words["minutes"], "--time") / 60))
    job = LaunchJob(
        name, command, plan, nodes, per_node, folder,
        accelerated=not words["cpu"] and (cluster is None or cluster.device.kind != "cpu"),
        device_name=cluster.device.name if cluster is not None else "", cpus_per_rank=words["cpus_per_rank"],
        minutes=limit, queue=words["queue"], account=words["account"], image=words["image"], hosts=hosts,
        port=words["port"], setup=_setup(words["setup"], chosen.name), variables=variables_of(words["variables"]),
        extra=tuple(words["extra"]), volume=words["volume"], accelerator=words["accelerator"],
        goes_on=effective is not None, work_folder=os.getcwd(),
    )  # fmt: skip
    return job, cluster


def _command(
    target: str, arguments: tuple[str, ...], effective: Effective | None, plan: Plan, out: str
) -> tuple[str, ...]:
    """Returns the words of the command that each rank runs.

    out   train.out of a run, a folder of this job alone, so that `--resume auto` finds its own runs
    """
    if effective is None:
        return ("python", target, *arguments)
    return (
        "shardwise", "train", target, "--plan", str(plan), "--resume", "auto", "--set", f"train.out={out}", *arguments,
    )  # fmt: skip


def _setup(asked: str | None, engine: str) -> str:
    """Returns shell lines to run before the ranks.

    These are `asked` (--setup) if given, else the activation of this virtual environment for engines whose hosts share
    its folder, else "".
    """
    if asked is not None:
        return asked
    script = Path(sys.prefix) / "bin" / "activate"
    shared = engine in ("slurm", "pbs", "hosts", "torchrun")
    return f"source {shlex.quote(str(script))}" if shared and script.is_file() else ""


def _map(answer: Answer, job: Any, cluster: Any) -> list[str]:
    """Returns the lines of the map of ranks, and puts them into the answer's JSON as "map"."""
    from shardwise.launch.rank_map import map_lines

    lines = map_lines(job.plan, job.nodes, job.per_node, cluster)
    answer.fields["map"] = lines
    return lines


def _forecast(answer: Answer, effective: Effective | None, cluster: Any, words: dict[str, Any]) -> list[str]:
    """Returns lines on step time, hours and price, or a line on why there are none; [] without --cluster.

    Raises `InputError` for --price without --cluster.
    """
    if words["price"] and cluster is None:
        raise InputError("--price is for a forecast of hours: give --cluster")
    if cluster is None:
        return []
    if effective is None:
        return ["no forecast of hours: a script is not traced before it runs"]
    try:
        with waiting(answer, "launch: loading PyTorch and the figures of the catalogue") as say:
            from shardwise.launch.job_forecast import cost_lines, job_cost

            cost = job_cost(effective, cluster, words["price"], say)
    # the job can be started without a forecast, so an error is only reported
    except ShardwiseError as error:
        return [f"no forecast of hours: {error}"]
    answer.fields["job"] = cost.as_dict()
    return cost_lines(cost, cluster)
