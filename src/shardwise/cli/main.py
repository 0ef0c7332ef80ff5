"""The commands `train` and `config`, the list of all commands, and the console script.

Importing this module does not import torch, so that help and error messages are quick.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import weakref
from typing import Any

import click

import shardwise
from shardwise.cli import compare, evidence, foresee, probe, prove, report, run_script
from shardwise.cli.answer import INTERRUPTED, Answer, Ended, quiet_stdout, speaks
from shardwise.cli.checkpoint import checkpoint
from shardwise.cli.completion import ASKED, answer_shell, completion
from shardwise.cli.doctor import doctor
from shardwise.cli.launch import launch
from shardwise.cli.options import WholeNumber, common, given, given_plan
from shardwise.cli.show import show
from shardwise.cli.waiting import waiting
from shardwise.errors import InputError
from shardwise.progress import unbroken_stderr

PLAN_HELP = "How to spread it: dp_shard=2,zero=3, or a .toml file with the same keys."
AGAIN_S, IMPORT_S = 0.3, 10.0  # seconds: until `Ended` is raised again if swallowed; for which imports may delay it
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


def version(context: click.Context, parameter: click.Parameter, asked: bool) -> None:
    """Prints versions and the device that a run would take, and exits; callback of --version."""
    if not asked or context.resilient_parsing:
        return
    click.echo(f"shardwise {shardwise.__version__}")
    sys.stdout.flush()  # the rest takes as long as importing torch
    from shardwise.device import describe

    click.echo(describe())
    context.exit()


@click.group(context_settings=SETTINGS)
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=version, help="Versions, device.")
def main() -> None:
    """Train any PyTorch module under any parallelism, and prove that it equals one process.

    \b
    shardwise train                              a small decoder on text, here and now
    shardwise train my.py:task --plan dp_shard=2 your own task on two ranks
    shardwise verify my.py:task --plan dp_shard=2,zero=3
    shardwise show schedule pp=4,schedule=zbv    what a pipeline's ranks do when
    shardwise show tp my.py:task --plan tp=4     which weights are cut
    shardwise plan llama3-8b --cluster "2x8 h100-sxm-80gb, ib-400" --global-batch 4M-tokens --seq 8k
    shardwise config --starter > my.toml
    shardwise doctor                             can this host run ranks?

    Exit codes: 0 done, 1 failed or no parity, 2 bad input, 3 refused plan, 75 stopped and saved.
    """


@main.command()
@click.argument("target", required=False, metavar="[CONFIG.toml | MODULE:TASK | FOLDER | text | digits]")
@click.option(
    "--data",
    metavar="FILE",
    callback=given,
    help="Files of examples or text for a folder, or where they lie: short for --set task.files.",
)
@click.option("--plan", callback=given_plan, help=PLAN_HELP)
@click.option("--nproc", type=WholeNumber(min=1), help="Ranks to start; by default as many as the plan needs.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set a configuration key; repeatable.")
@click.option("--steps", type=WholeNumber(min=1), help="Optimizer steps: short for --set train.steps=N.")
@click.option(
    "--checkpoint-every", type=WholeNumber(min=0), metavar="N", help="Steps between checkpoints; else by time."
)
@click.option(
    "--resume",
    metavar="RUN",
    callback=given,
    help="Go on with a run's folder or checkpoint; auto: this task's last; new: none.",
)
@click.option(
    "--restarts", type=WholeNumber(min=0), metavar="N", help="Start again up to N times when a rank dies or hangs."
)
@click.option(
    "--init-from", metavar="PATH", callback=given, help="Begin with the weights of a run, a checkpoint or safetensors."
)
@click.option("--profile-steps", metavar="10:12", help="Trace these steps: short for --set train.profile_steps=10:12.")
@click.option(
    "--cluster",
    callback=given,
    help="A file of `shardwise probe`: the run writes its forecast beside what it measures.",
)
@click.option("--verify-first", is_flag=True, help="Prove the run in small first, as `verify CONFIG.toml` does.")
@common
@click.pass_obj
def train(
    answer: Answer,
    target: str | None,
    data: str | None,
    plan: str | None,
    nproc: int | None,
    overrides: tuple[str, ...],
    steps: int | None,
    checkpoint_every: int | None,
    resume: str | None,
    restarts: int | None,
    init_from: str | None,
    profile_steps: str | None,
    cluster: str | None,
    verify_first: bool,
) -> None:
    """Train a task and write a run folder.

    \b
    shardwise train text --plan dp_shard=2,zero=3 --steps 20

    The target is a configuration file, a function of your own that returns a Task (a module on the Python path or
    in this folder, or the path of a .py file), a checkpoint folder of transformers with --data chat.jsonl, or a
    built-in task: "text" (the default) or "digits". Under
    torchrun, srun or mpirun, this process joins the run as one rank; otherwise it starts the ranks that the plan
    needs.

    SIGTERM, SIGUSR1, a lost terminal or Ctrl-C: the step under way is finished, the state saved, and the exit code
    is 75; the same command again goes on from there. Ctrl-C before the first step ends the run at once, with 130.
    """
    from shardwise.layout import check

    if init_from is not None and resume not in (None, "auto", "new"):  # auto: the job starts again and again
        raise click.UsageError("--resume goes on with a run and --init-from begins a new one: give one of them")
    if target is None and resume not in (None, "auto", "new"):
        target = _of_run(str(resume))
    effective = _effective(target, overrides, {
        "--plan": ("plan", plan), "--steps": ("train.steps", steps), "--data": ("task.files", data and [data]),
        "--profile-steps": ("train.profile_steps", profile_steps), "--cluster": ("train.cluster", cluster),
        "--checkpoint-every": ("train.checkpoint_every", checkpoint_every),
        "--restarts": ("train.restarts", restarts), "--init-from": ("train.init_from", init_from),
    })  # fmt: skip
    answer.fields.update(plan=str(effective.plan), world_size=effective.plan.world_size)
    check(effective.plan)
    with waiting(answer, "train: loading PyTorch"):
        from shardwise.training import execute

    if verify_first:
        prove.verified_first(effective)
    run = execute(effective, nproc=nproc, resume=resume)
    answer.fields.update(run.summary)
    answer.text = str(run)


@main.command()
@click.argument("path", required=False, metavar="[CONFIG.toml]")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set a configuration key; repeatable.")
@click.option("--starter", is_flag=True, help="Write a commented file with every key and its default.")
@common
@click.pass_obj
def config(answer: Answer, path: str | None, overrides: tuple[str, ...], starter: bool) -> None:
    """Show the effective configuration, and where each value came from.

    \b
    shardwise config --set optimizer.lr=3e-4
    shardwise config --starter > my.toml

    The output is TOML that `shardwise train` reads.
    """
    from shardwise import config as room

    if starter:
        if path or overrides:
            raise click.UsageError("--starter takes no file and no --set")
        answer.text = answer.fields["config"] = room.starter()
        return
    effective = _effective(path, overrides, {})
    answer.text = room.show(effective)
    answer.fields.update(
        config={**effective.config.model_dump(), "plan": effective.plan.as_dict(defaults=True)},
        sources=effective.sources,
        plan=str(effective.plan),
        world_size=effective.plan.world_size,
    )
    for note in effective.notes:
        click.echo(note, err=True)


def _of_run(resume: str) -> str | None:
    """Returns the path of the config.toml of a run's folder, or of the run that has this checkpoint; None if none."""
    from pathlib import Path

    above = (Path(resume), *list(Path(resume).parents)[:2])
    return next((str(folder / "config.toml") for folder in above if (folder / "config.toml").is_file()), None)


def _effective(target: str | None, overrides: tuple[str, ...], options: dict[str, tuple[str, Any]]) -> Any:
    """Returns the `Effective` configuration of a command line.

    target     a .toml file, or the name of a task; `overrides`: "KEY=VALUE" of each --set
    options    option, such as "--steps" -> (its key, its value or None if it is not given)
    """
    from shardwise.config import Given, load

    values = []
    path = target if target is not None and target.endswith(".toml") else None
    if target is not None and path is None:
        values.append(Given("task.name", target, "the task argument"))
    values += [Given(key, value, option) for option, (key, value) in options.items() if value is not None]
    return load(path, overrides, values)


main.add_command(checkpoint)
main.add_command(prove.verify)
main.add_command(show)
main.add_command(completion)
main.add_command(run_script.run)
main.add_command(doctor)
main.add_command(launch)
main.add_command(report.report)
for command in (foresee.plan, foresee.simulate, compare.compare, probe.probe, evidence.evidence):
    main.add_command(command)


def end(number: int, frame: Any) -> None:
    """Handles SIGTERM: raises `Ended`, and again on SIGALRM if the first one was swallowed.

    For up to `IMPORT_S` seconds it waits for imports to end, since C++ that calls Python there aborts on an exception.
    """
    now = time.monotonic()
    first = Ended.arrived is None
    arrived = Ended.arrived = now if Ended.arrived is None else Ended.arrived
    again = signal.getsignal(signal.SIGALRM) is end
    # code that catches everything may swallow the exception, so the alarm raises another
    if again:
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
    # the exception raised last is still propagating
    if Ended.raised() is not None:
        return
    if again and _importing(frame) and now - arrived < IMPORT_S:
        if first:
            os.write(2, b"\nSIGTERM: this ends as soon as what is being imported is there\n")
        return
    ended = Ended()
    Ended.raised = weakref.ref(ended)
    try:
        raise ended
    finally:
        del ended  # its traceback holds this frame; without this cycle it is freed as soon as it is swallowed


def _importing(frame: Any) -> bool:
    """Whether a frame or one of its callers belongs to Python's import machinery."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def call(args: list[str]) -> int:
    """Runs one command line and prints its answer; returns the exit code. `args`: the words without the program."""
    answer = Answer(args)
    with quiet_stdout(answer.as_json):
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})  # `__main__` blocked them
            _stand_somewhere()
            _refuse_undecoded(args)
            code = main.main(args or ["--help"], prog_name="shardwise", standalone_mode=False, obj=answer)
            if answer.as_json and isinstance(code, int):  # --help or --version ended it
                answer.fields["error"] = "nothing was run: only help or the version was asked for"
        except (Exception, SystemExit, KeyboardInterrupt, Ended) as error:  # the user's code may call sys.exit
            signal.setitimer(signal.ITIMER_REAL, 0)
            # click turns any EOFError into Abort (Ctrl-D), but this one came from the user's code
            if isinstance(error, click.Abort) and isinstance(error.__cause__, EOFError):
                error = error.__cause__
            answer.fail(error)
    if (answer.as_json or answer.text) and speaks():
        return answer.code if _written(answer.output()) else 1
    return answer.code


def _written(text: str) -> bool:
    """Writes the answer to stdout; returns False, with a message, if that fails for another reason than a closed pipe.

    After a failure stdout is redirected to /dev/null, since Python flushes it at exit.
    """
    try:
        click.echo(text)
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            click.echo(f"shardwise: done, but the answer cannot be written to stdout: {error.strerror}", err=True)
            return False
    return True


def _stand_somewhere() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:
        raise InputError("the folder in which this was started is gone: go to one that is there") from None


def _refuse_undecoded(args: list[str]) -> None:
    """Raises `InputError` for characters that the locale cannot decode, since writing them would fail later."""
    for word in (*args, os.getcwd()):
        if any("\udc80" <= letter <= "\udcff" for letter in word):
            shown = os.fsencode(word).decode(errors="replace")
            raise InputError(f"{shown!r} has letters that this shell's locale does not: export LC_ALL=C.UTF-8")


def _open_streams() -> None:
    """Opens closed standard streams (`>&-`) on /dev/null, so that files opened later do not get descriptors 0 to 2."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, number)
            os.set_inheritable(number, True)  # for rank processes; dup2 does not set it if `nowhere` is `number`
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def _told_unless_ended(unraisable: Any) -> None:
    """Reports an unraisable exception, unless it is `Ended`, which is raised again; a `sys.unraisablehook`."""
    if unraisable.exc_type is not Ended:
        sys.__unraisablehook__(unraisable)


def run() -> None:
    """Runs the command line of this process and exits with its code; the entry point of the console script."""
    _open_streams()
    unbroken_stderr()
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGALRM, end)
    sys.unraisablehook = _told_unless_ended
    from shardwise.ranks import leave

    if os.environ.get(ASKED):
        answer_shell(main)
        return
    code = call(sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C has nothing left to end
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second SIGTERM ends the process even while it cleans up
    signal.setitimer(signal.ITIMER_REAL, 0)
    sys.stdout.flush()
    if code == INTERRUPTED:  # after an interrupt within `exec`, Python would end by SIGINT though it was caught
        sys.stderr.flush()
        os._exit(code)
    if "--json" in sys.argv:
        os.dup2(2, 1)  # what is written at the interpreter's exit is not part of the answer
    leave(code)
