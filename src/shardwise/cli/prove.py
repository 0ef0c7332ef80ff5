"""The command `verify`: proves a task (proof/parity), a configuration (proof/verify_run), a script (scripts/proof)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from shardwise.cli.answer import Answer
from shardwise.cli.options import WholeNumber, common, given, given_plan, with_adapters
from shardwise.cli.waiting import waiting
from shardwise.errors import InputError, RefusedPlan
from shardwise.task_files import is_run

_PLAN = "How to spread it: dp_shard=2,zero=3, or a .toml file with the same keys. A script's own by default."


class StepCount(click.ParamType):
    """A type of click: a number of steps, at least 1, or "all"."""

    name = "N|all"

    def convert(self, value: Any, parameter: Any, context: Any) -> Any:
        """Returns the value as an int of at least 1, or "all"; click's usage error for anything else."""
        return value if value == "all" else WholeNumber(min=1).convert(value, parameter, context)


@click.command(context_settings={"ignore_unknown_options": False})
@click.argument("target", metavar="SCRIPT.py | CONFIG.toml | MODULE:TASK | FOLDER | text | digits")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGS]")
@click.option("--data", metavar="FILE", callback=given, help="Examples for a folder, as train takes them.")
@click.option("--plan", callback=given_plan, help=_PLAN)
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set a key of CONFIG.toml, or of [lora]; repeatable."
)
@click.option(
    "--steps", type=StepCount(), help="Optimizer steps to compare: of a script 6, a configuration 5, a task 2."
)
@click.option("--epochs", type=WholeNumber(min=1), help="Of a script: whole epochs in the place of steps.")
@click.option("--seed", type=WholeNumber(min=0), help="Seed of weights and data; 0, or the configuration's.")
@click.option(
    "--shrink",
    is_flag=True,
    help="A small proof of a large plan: the least ranks, blocks and samples that keep its structure.",
)
@click.option(
    "--thorough",
    is_flag=True,
    help="Of a task: also with 3 ranks of an axis, 3 steps, odd batches, ties; and in its own precision.",
)
@click.option("--clip-norm", type=float, default=None, help="Largest norm of the gradient, clipped on both sides.")
@click.option("--device", default="cpu", show_default=True, help="Of both sides: cpu, or the accelerator: cuda, xpu.")
@click.option("--backend", help="The accelerator's own, for ranks that share it; by default gloo.")
@click.option("--against", callback=given, metavar="SCRIPT.py", help="The script as it was before it was changed.")
@click.option("--nproc", type=WholeNumber(min=1), help="Ranks of a script that sets up its own (DDP, FSDP, ...).")
@click.option("--one", metavar="ARGS", help="Arguments of its one process, where they are others: --batch-size 64.")
@click.option("--cwd", callback=given, metavar="FOLDER", help="Run a script there, for real; else in a scratch copy.")
@click.option(
    "--check-order",
    is_flag=True,
    help="Of a task: also whether what ranks issue over NCCL ends on a device that runs it in order, unbuffered.",
)
@common
@click.pass_obj
def verify(answer: Answer, target: str, arguments: tuple[str, ...], **words: Any) -> None:
    """Compare training under a plan with one process: loss, gradients, parameters, buffers, optimizer state.

    \b
    shardwise verify train.py --plan dp_shard=2,zero=3 -- --epochs 3
    shardwise verify train_ddp.py --nproc 2 --one "--batch-size 64" -- --batch-size 32
    shardwise verify digits --plan dp_shard=2,zero=3
    shardwise verify my.toml

    A script runs in one process, in which `prepare` does nothing but record, and on the plan's ranks, in float64; it
    is ended after a few optimizer steps. Of a configuration, or a folder of transformers with --data, what `train` does
    with it is compared with a plain loop.

    Exit code 0 when they agree, 1 when they do not or nothing was proven, 3 when the plan is refused.
    """
    with launcher_ranks() as (pool, code):
        parity = _prove(answer, target, arguments, words, pool) if code is None else None
        if pool is not None:
            pool.code = _code(parity)
    # on a launcher's other ranks only the exit code is left, since rank 0 answers
    if parity is None:
        answer.code = code or 0
        return
    answer.fields.update(_plain(parity.as_dict()))
    if parity.refused:
        raise RefusedPlan(parity.refused)
    answer.text = parity.text()
    answer.code = _code(parity)
    if words["check_order"]:
        from shardwise.testing.order_check import check_order

        order = check_order(target, words["plan"])
        answer.text += f"\n{order.text()}"
        answer.fields["order"] = {
            "strictest": order.strictest.runs, "side_by_side": order.side_by_side.runs,
            "communicators": order.communicators, "waits": order.strictest.text(),
        }  # fmt: skip
        answer.code = answer.code if order.side_by_side.runs else 1


def _code(parity: Any) -> int:
    """Returns the exit code of a proof: 0 equal, 1 not equal or not proven, 3 refused."""
    return RefusedPlan.exit_code if parity.refused else 0 if parity.parity else 1


@contextmanager
def launcher_ranks() -> Iterator[tuple[Any, int | None]]:
    """Context that gives (`LauncherRanks` or None, exit code or None).

    Without a launcher it gives (None, None). On a launcher's rank 0 it gives (ranks, None); at the end the other ranks
    get `ranks.code`, or an error's code, as exit code. On other ranks it serves rank 0's calls, and gives (None, exit
    code) once rank 0 has ended.
    """
    from shardwise.errors import ShardwiseError
    from shardwise.ranks import LauncherRanks, here

    if here() is None:
        yield None, None
        return
    ranks = LauncherRanks()
    if ranks.rank:
        yield None, ranks.serve()
        return
    try:
        yield ranks, None
    except BaseException as error:
        ranks.end(error.exit_code if isinstance(error, ShardwiseError) else 1)
        raise
    ranks.end(ranks.code)


def _prove(answer: Answer, target: str, arguments: tuple[str, ...], words: dict[str, Any], pool: Any) -> Any:
    """Returns the `Parity` of the target: a configuration, a script, or else a task.

    words   the command's options by name; `pool`: a launcher's ranks, None without
    """
    if target.endswith(".toml") or _is_model(Path(target)):
        _refuse(words, arguments, "a configuration", "thorough", "device", "backend", "epochs", "against", "nproc",
                "one", "cwd", "check_order")  # fmt: skip
        return _prove_run(answer, target, words, pool)
    # the folder of a run is recognised first, for a message of its own
    if is_run(Path(target)):
        raise InputError(
            f"verify: {target} is the folder of a run: {Path(target) / 'config.toml'} is its configuration, and train "
            f"--resume {target} goes on with it"
        )
    # a folder or a notebook would be taken for the name of a task
    if Path(target).is_dir() or target.endswith(".ipynb"):
        what = "a folder" if Path(target).is_dir() else "a notebook"
        raise InputError(f"verify: {target} is {what}: give a script in Python, as {Path(target).stem or 'train'}.py")
    if is_script(target):
        # under a launcher each rank would start the script's ranks again
        if pool is not None:
            raise InputError("verify: a script's ranks are started by verify itself: call it alone, without a launcher")
        _refuse(words, (), "a script", "data", "overrides", "seed", "shrink", "thorough", "clip_norm", "device",
                "backend", "check_order")  # fmt: skip
        return _prove_script(answer, target, arguments, words)
    _refuse(words, arguments, "a task", "data", "epochs", "against", "nproc", "one", "cwd")
    return _prove_task(answer, target, words, pool)


def _is_model(folder: Path) -> bool:
    """Whether `folder` is a model folder of transformers: it has a config.json and is no run."""
    return (folder / "config.json").is_file() and not is_run(folder)


def is_script(target: str) -> bool:
    """Whether `target` names a Python file to run as a script: one that calls `prepare`, or defines no tasks."""
    if not target.endswith(".py"):
        return False
    from shardwise.task_files import calls_prepare, defines_task

    return not Path(target).is_file() or calls_prepare(target) or not defines_task(target)


_UNSET = {"overrides": (), "device": "cpu", "shrink": False, "thorough": False, "check_order": False}


def _refuse(words: dict[str, Any], arguments: tuple[str, ...], what: str, *names: str) -> None:
    """Raises a usage error for options, or arguments after the target, that do not apply to this kind of target.

    what    the kind of target, for the message; `names`: options that must be unset
    """
    for name in names:
        if words[name] != _UNSET.get(name):
            if name == "overrides":
                raise click.UsageError(f"--set is for CONFIG.toml; of {what} nothing is configured")
            raise click.UsageError(f"--{name.replace('_', '-')} is not for {what}")
    if arguments:
        raise click.UsageError(f"{' '.join(arguments)}: words after the target are a script's own, and this is {what}")


def _prove_script(answer: Answer, script: str, arguments: tuple[str, ...], words: dict[str, Any]) -> Any:
    """Returns the `Parity` of a script; `words`: the command's options by name."""
    answer.fields.update(plan=words["plan"])
    with waiting(answer, "verify: loading PyTorch") as say:
        from shardwise.scripts.proof.verify_script import STEPS, verify_script

        steps = words["steps"] or STEPS
        return verify_script(
            script, arguments, plan=words["plan"], steps=None if steps == "all" else steps, epochs=words["epochs"],
            against=words["against"], nproc=words["nproc"], one=words["one"], cwd=words["cwd"], say=say,
        )  # fmt: skip


def _prove_task(answer: Answer, task: str, words: dict[str, Any], pool: Any) -> Any:
    """Returns the `Parity` of a task under --plan; `words`: the command's options, `pool`: a launcher's ranks."""
    from shardwise.layout import Plan, check

    adapted = with_adapters(task, words["overrides"], "verify")
    if words["plan"] is None:
        raise click.UsageError("Missing option '--plan'.")
    parsed = Plan.parse(words["plan"])
    answer.fields.update(plan=str(parsed), world_size=parsed.world_size)
    check(parsed)
    with waiting(answer, "verify: loading PyTorch") as say:
        from shardwise.proof.parity import verify as prove

        return prove(
            adapted, parsed, steps=_number(words["steps"], "a task") or 2, seed=words["seed"] or 0,
            shrink=words["shrink"], thorough=words["thorough"], clip_norm=words["clip_norm"], device=words["device"],
            backend=words["backend"],
            pool=pool,
            say=say,
        )  # fmt: skip


def _number(steps: int | str | None, what: str) -> int | None:
    if steps == "all":
        raise click.UsageError(f"--steps all is for a script, and this is {what}")
    return steps  # type: ignore[return-value]


def _prove_run(answer: Answer, target: str, words: dict[str, Any], pool: Any) -> Any:
    """Returns the `Parity` of a run, given by its configuration or a folder of transformers with --data."""
    from shardwise.config import Given, load

    if words["shrink"]:
        raise click.UsageError("--shrink is for tasks: a configuration is proven under its own plan")
    # these options of `verify` are keys of the configuration
    settings = {"train.seed": words["seed"], "train.clip_norm": words["clip_norm"]}
    overrides = (*words["overrides"], *(f"{key}={value}" for key, value in settings.items() if value is not None))
    # a folder of transformers is the task's name; a configuration names its own
    named = None if target.endswith(".toml") else target
    data = words["data"] and [words["data"]]
    asked = (("task.name", named, "the target"), ("task.files", data, "--data"), ("plan", words["plan"], "--plan"))
    effective = load(None if named else target, overrides, [Given(*each) for each in asked if each[1] is not None])
    answer.fields.update(plan=str(effective.plan), world_size=effective.plan.world_size)
    with waiting(answer, "verify: loading PyTorch"):
        from shardwise.proof.verify_run import verify_run

    return verify_run(effective, steps=_number(words["steps"], "a configuration"), pool=pool)


def verified_first(effective: Any) -> None:
    """Proves a run before it starts (`train --verify-first`), on all ranks of a launcher.

    Raises `RunError` unless it equals a plain loop in one process, `RefusedPlan` if the proof is refused.
    """
    from shardwise.errors import RunError
    from shardwise.proof.verify_run import verify_run

    with launcher_ranks() as (pool, code):
        # only rank 0 proves; the others have served its calls and have a code
        parity = verify_run(effective, pool=pool) if code is None else None
        if parity is not None and parity.refused:
            raise RefusedPlan(parity.refused)
        if parity is not None:
            click.echo(parity.text(), err=True)
            if not parity.parity:
                raise RunError(f"not begun, since the run is {parity.verdict}")
    # on the other ranks, which must end with rank 0's exit code
    if code == RefusedPlan.exit_code:
        raise RefusedPlan("the proof before the run was refused: rank 0 says why")
    if code:
        raise RunError("not begun, since the proof before the run failed: rank 0 says why")


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    from shardwise.observe.metrics import finite

    return finite(fields)
