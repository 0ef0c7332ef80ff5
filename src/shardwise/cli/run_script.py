"""The command `run`: runs a user's script on ranks of this machine (ranks/script runs it in each rank)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import click

from shardwise.cli.answer import Answer
from shardwise.cli.options import WholeNumber, common
from shardwise.cli.waiting import waiting
from shardwise.errors import InputError, RefusedPlan, RunError, ShardwiseError, did_you_mean, rebuilt
from shardwise.task_files import looked_in


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--nproc", type=WholeNumber(min=1), help="Ranks to start; by default one for each GPU, or two.")
@click.option("--verify-first", is_flag=True, help="Prove the script first, as `shardwise verify` does; then run it.")
@click.option("--profile-steps", metavar="10:12", help="Trace steps 10 and 11 of the script's loop, into profile/.")
@click.option("--show-ranks", is_flag=True, help="Leave RANK, WORLD_SIZE and the like in the script's environment.")
@common
@click.argument("script", metavar="SCRIPT.py")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
@click.pass_obj
def run(
    answer: Answer, nproc: int | None, verify_first: bool, profile_steps: str | None, show_ranks: bool, script: str,
    arguments: tuple[str, ...],
) -> None:  # fmt: skip
    """Run a script that calls `prepare` or `parallelize`, on ranks of this machine.

    \b
    shardwise run --nproc 2 script.py --lr 1e-3      options before the script are run's, those behind it its own

    As `torchrun --nproc-per-node N script.py`, with the ranks watched: the first failure ends all, and its traceback
    is shown once, last. RANK, WORLD_SIZE and the like are hidden from the script, which may branch on them to set up
    ranks of its own; --show-ranks leaves them there. On several hosts use torchrun, srun or mpirun.
    """
    from shardwise.ranks import here, launch
    from shardwise.ranks.script import cause_of, of_script, run_script, stacks_first

    path = Path(script)
    if script.startswith("-"):
        plan = "; the plan stands in the script: prepare(..., plan=...)" if script.startswith("--plan") else ""
        raise InputError(f"run: there is no option {script}{plan}; ranks: run --nproc N SCRIPT.py")
    if path.is_dir():
        raise InputError(f"run: {script or 'the script'} is a folder: give a file in it, as {path / 'train.py'}")
    if not path.is_file():
        if arguments and arguments[0].endswith(".py") and Path(arguments[0]).is_file():
            raise InputError(
                f"run: leave {script} out: run starts Python itself, as shardwise run {' '.join(arguments)}"
            )
        near = did_you_mean(path.name, sorted(each.name for each in path.parent.glob("*.py")))
        raise InputError(f"run: there is no file {script}{looked_in(path)}{near}")
    _refuse_no_python(path)
    place = here()
    if place is not None and place.world_size > 1:
        raise InputError(
            f"run: {place.named} has started {place.world_size} ranks already: give it the script itself, without "
            "shardwise run"
        )
    ranks = nproc or _devices()
    answer.fields.update(world_size=ranks)
    check_profile = _profiled(profile_steps, path) if profile_steps is not None else None
    if verify_first:
        _prove(answer, script, arguments)
    if behind := [
        word
        for word in arguments
        if word.split("=")[0] in ("--nproc", "--show-ranks", "--verify-first", "--profile-steps")
    ]:
        click.echo(
            f"run: {behind[0]} stands behind {path.name} and is the script's; run's own stand before it", err=True
        )
    try:
        with ExitStack() as stack:
            stack.enter_context(waiting(answer, f"run: starting {ranks} ranks"))
            launch(
                run_script, ranks, (script, arguments, show_ranks, profile_steps), name=script,
                on_event=lambda event: stack.close(),  # from here on the script writes to the terminal
            )  # fmt: skip
    except ShardwiseError as error:
        trace = getattr(error, "remote_traceback", "")
        if not trace:  # a hang: print its stacks first, so that the cause comes last
            stacks, message = stacks_first(str(error))
            if stacks:
                click.echo(stacks, err=True)
            raise rebuilt(type(error), message) from None
        if shown := of_script(trace, script).rstrip():
            click.echo(shown, err=True)
        failed = rebuilt(
            type(error), f"run: rank {getattr(error, 'rank', 0)} of {ranks} failed: {cause_of(trace, script)}"
        )
        raise failed from None
    if check_profile is not None:
        check_profile()


def _profiled(steps: str, script: Path) -> Callable[[], None]:
    """Returns a function that, called after the run, raises `RunError` if no profile was written.

    steps   value of --profile-steps, as "10:12"
    """
    from shardwise.observe.profile_steps import FOLDER, read_steps_of_script

    traces, stop = Path(FOLDER, "rank0.json"), read_steps_of_script(steps).stop
    before = _written(traces)

    def check() -> None:
        if _written(traces) == before:
            raise RunError(
                f"run: nothing was profiled: {script.name} took fewer than {stop} optimizer steps with what prepare "
                "returns"
            )

    return check


def _written(path: Path) -> float:
    """Returns when a file was last written, in seconds since the epoch; 0 if there is no file."""
    return path.stat().st_mtime if path.is_file() else 0.0


def _prove(answer: Answer, script: str, arguments: tuple[str, ...]) -> None:
    """Proves the script under its own plan; raises `RunError` or `RefusedPlan` unless it equals one process."""
    with waiting(answer, "run: proving the script first") as say:
        from shardwise.scripts.proof.verify_script import verify_script

        parity = verify_script(script, arguments, say=say)
    if parity.refused:
        raise RefusedPlan(parity.refused)
    click.echo(parity.text(), err=True)
    if not parity.parity:
        raise RunError(f"run: not begun, since the script is {parity.verdict}")


def _refuse_no_python(path: Path) -> None:
    """Raises `InputError` for a notebook or a script that Python cannot compile, before any rank is started."""
    if path.suffix == ".ipynb":
        raise InputError(f"run: {path} is a notebook: save it as a script (jupyter nbconvert --to script {path})")
    try:
        compile(path.read_bytes(), str(path), "exec")
    except (SyntaxError, ValueError) as error:  # ValueError: null bytes
        line = getattr(error, "lineno", None)
        at = f"{path}:{line}" if line else str(path)
        raise InputError(f"run: {at}: {type(error).__name__}: {getattr(error, 'msg', None) or error}") from None


def _devices() -> int:
    """Returns the number of GPUs, from their device files without importing torch; 2 (CPU ranks) if there is none."""
    return len(list(Path("/dev").glob("nvidia[0-9]*"))) or 2
