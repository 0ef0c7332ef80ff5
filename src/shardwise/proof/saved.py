"""Read the last checkpoint of a proof's run as unsharded tensors and compare it with the end of the plain loop.

    ranks        pieces of weights, averages and optimizer state, each labelled with its tensor and place
    one process  tensors of every name in the module's state_dict, and of the optimizer's state by parameter

So pieces with wrong labels are found, though the plan that wrote them would read them back correctly.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from shardwise.checkpoint.inspect import opened, state_dict_names
from shardwise.checkpoint.load import tensor_of
from shardwise.checkpoint.pieces import Piece
from shardwise.errors import InputError
from shardwise.proof.compare_records import tensor_error
from shardwise.proof.outcome import GRADIENT_FLOOR, NUMBER_BAR, Parity
from shardwise.proof.plain_run import RunRecord
from shardwise.training.keeping import GOES_ON, SAVED_ALL_THE_SAME


def read_saved(folder: Path, record: RunRecord) -> None:
    """Puts the tensors and counts of the newest checkpoint under the run folder `folder` into the record.

    Without a checkpoint it puts nothing. A save that failed is a difference, though the run itself may have gone on
    with a notice.
    """
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    failed = [notice for notice in summary["notices"] if SAVED_ALL_THE_SAME in notice or GOES_ON in notice]
    record.differences += [f"a checkpoint of the run could not be written: {notice}" for notice in failed]
    try:
        stored = opened(folder / "checkpoints")
    except InputError as error:
        if any((folder / "checkpoints").glob("step-*")):
            record.differences.append(f"the run's checkpoint cannot be read: {error}")
        return  # an optimizer whose state cannot be saved: the run has a notice about it
    record.kept = sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-" + 8 * "[0-9]"))
    with stored:
        assert stored.manifest is not None
        whole = {
            key: tensor_of(stored, key, Piece.whole(tensor.shape)).view(tensor.shape)
            for key, tensor in stored.tensors.items()
            if not key.startswith("random/")
        }
        names = state_dict_names(stored)
        # frozen weights that the task reads from files of its own, which the checkpoint does not repeat
        record.read_again = {*stored.manifest.fields["names"]} - {*names}
        # `compare_saved` reports what is missing; there are averages only if the run keeps them
        record.saved = {name: whole[key] for name, key in names.items() if key in whole}
        averages = {name: "ema" + key.removeprefix("model") for name, key in names.items()}
        record.saved_averages = {name: whole[key] for name, key in averages.items() if key in whole}
        record.states = {key.removeprefix("optimizer/"): value for key, value in whole.items()
                         if key.startswith("optimizer/")}  # fmt: skip
        engine, run, data = (stored.manifest.fields.get(key) or {} for key in ("engine", "run", "data"))
        record.counts = {
            "steps taken": engine["steps"], "steps skipped": engine["skipped"], "seed": engine["seed"],
            "number of its step": stored.manifest.step, "first loss": run["first_loss"],
            "samples read": data.get("position"), "last loss": summary["loss"], "held-out loss": summary["eval_loss"],
        }  # fmt: skip


def compare_saved(parity: Parity, single: RunRecord, ranks: RunRecord, rate: float) -> None:
    """Compares the checkpoint (`ranks`) with the end of the plain loop (`single`) into `parity`.

    rate   the largest learning rate: errors of weights are relative to their largest element, or to this if it is more
    """
    if not ranks.saved:
        parity.notes.append("the run made no checkpoint, so none was compared")
        return
    if ranks.kept != single.kept:
        parity.differences.append(f"checkpoints lie there of steps {ranks.kept}, and {single.kept} are due and kept")
    for prefix, ours, theirs in (
        ("checkpoint's ", single.saved, ranks.saved),
        ("checkpoint's average of ", {n: single.averages[n] for n in single.averaged}, ranks.saved_averages),
    ):
        for name, value in ours.items():
            # not in the checkpoint, since the task reads them from files
            if name in ranks.read_again:
                continue
            if name not in theirs or theirs[name].shape != value.shape:
                parity.differences.append(f"{prefix}'{name}' is missing, or has another shape")
                continue
            error = tensor_error(theirs[name].to(value.dtype), value, max(rate, 1e-300))
            parity.parameter_error[f"{prefix}{name}"] = error
    # a state near zero is rounding compared with the largest of its kind, so that sets the floor of errors
    largest: dict[str, float] = {}
    for name, value in single.states.items():
        kind = name.rpartition("/")[2]
        largest[kind] = max(largest.get(kind, 0.0), float(value.abs().max()))
    # for example an exp_avg of 1e-9 counts as zero if another parameter's is 1e-3
    for name, value in single.states.items():
        parameter, _, kind = name.rpartition("/")
        if name not in ranks.states or ranks.states[name].shape != value.shape:
            parity.differences.append(f"the checkpoint's {kind} of '{parameter}' is missing, or has another shape")
            continue
        scale = max(float(value.abs().max()), GRADIENT_FLOOR * largest[kind], 1e-300)
        error = float((ranks.states[name].to(value.dtype) - value).abs().max()) / scale
        parity.optimizer_error[f"checkpoint's {kind} of {parameter}"] = error
    for name, count in single.counts.items():
        saved = ranks.counts[name]
        # a count that one side lacks is a difference
        if saved is None or count is None or not math.isclose(saved, count, rel_tol=NUMBER_BAR):
            parity.differences.append(f"{name}, as the run's files tell: {saved}, of the plain loop {count}")
    counts = f"{len(ranks.saved)} weights and buffers, {len(ranks.saved_averages)} averages"
    parity.notes.append(f"the last checkpoint, read whole: {counts}, {len(single.states)} tensors of the optimizer")
