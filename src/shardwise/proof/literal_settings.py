"""Check what a run computes from its configuration by formulas of its own: steps, schedule, learning rate.

A proof runs a few steps, so it shares the run's schedule with the plain loop and replaces its length. The schedule and
length of the whole run are compared here, by formulas that import nothing of `training`.
"""

from __future__ import annotations

import itertools
import math
from fnmatch import fnmatchcase
from types import SimpleNamespace
from typing import Any

import torch

from shardwise.layout.dealing import Share
from shardwise.proof.literal import groups
from shardwise.random.reading_seeds import drawing
from shardwise.step.seeded_draws import seed_masks

MOST_LOOKED_AT = 2000  # steps of a schedule that are compared, spread evenly
NEAR = 1e-12  # tolerance, relative for rates


def steps(train: Any, samples: int | None, batch: int) -> int | None:
    """Returns the optimizer steps of `train.epochs` passes over `samples`; None if the run is given in steps.

    batch  samples of a global batch. The last one of an epoch may be short, and a part of an epoch counts its batches,
           rounded up
    """
    if train.epochs is None or samples is None:
        return None
    whole, rest = divmod(samples, batch)
    return max(1, math.ceil(train.epochs * (whole + (rest > 0))))


def rate(optimizer: Any, batch: int) -> float:
    """Returns the factor that `scale_lr` puts on the learning rate for a batch of this size, in samples or tokens."""
    times = batch / (optimizer.base_batch or 1)
    return {"none": 1.0, "linear": times, "sqrt": times**0.5}[optimizer.scale_lr]


def factor(schedule: Any, total: int, step: int) -> float:
    """Returns the schedule's factor on the learning rate at `step`, counted from 0, of a run of `total` steps."""
    rise = (step + 1) / (schedule.warmup_steps + 1) if step < schedule.warmup_steps else 1.0
    low = schedule.final_factor
    # a constant rate never falls to `final_factor`
    if schedule.name == "constant":
        return rise
    # warm-up, a constant part, and a fall over the last `length` steps
    if schedule.name == "wsd":
        length = schedule.decay_steps or max(1, round(schedule.decay_fraction * total))
        left = total - step  # steps from this one to the end, itself included
        return rise if left > length else rise * (low + (1 - low) * left / (length + 1))
    after = max(0, step - schedule.warmup_steps) / (total - schedule.warmup_steps)
    fall = 1 - after if schedule.name == "linear" else (1 + math.cos(math.pi * after)) / 2
    return rise * (low + (1 - low) * fall)


def _rates(task: Any) -> list[float]:
    """Returns the learning rate of each group of the optimizer that a task makes."""
    made = task.optimizer(groups([torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2))]))
    return [float(group["lr"]) for group in made.param_groups if group.get("lr") is not None]


def _adapters(lora: Any, job: Any) -> list[str]:
    """Returns [a sentence] if an adapter is missing, extra, or of other numbers than `[lora]` says; else []."""
    # no adapters
    if lora.rank is None:
        return []
    # without alpha it is the rank: a factor of 1, or under rslora the rank's root
    factor = (lora.rank if lora.alpha is None else lora.alpha) / (lora.rank**0.5 if lora.rslora else lora.rank)
    model = job.build_task().model()
    expected, adapted = _adapted(lora.targets, model), {p for p, layer in model.named_modules() if _is_adapted(layer)}
    # with other layers adapted, a comparison of their numbers would say nothing
    if expected != adapted:
        path = min(expected ^ adapted)
        return [f"'{path}' has {'an' if path in adapted else 'no'} adapter, and [lora] names {sorted(expected)}"]
    for path in sorted(adapted):
        layer: Any = model.get_submodule(path)
        for name, scaling in layer.scaling.items():
            dropped = getattr(layer.lora_dropout[name], "p", 0.0)
            if (layer.r[name], dropped) != (lora.rank, lora.dropout) or abs(scaling - factor) > NEAR * abs(factor):
                return [f"the adapter of '{path}' has rank {layer.r[name]}, factor {scaling:g} and dropout "
                        f"{dropped:g}; [lora] makes them {lora.rank}, {factor:g} and {lora.dropout:g}"]  # fmt: skip
    return []


def _is_adapted(layer: Any) -> bool:
    return bool(getattr(layer, "scaling", None)) and hasattr(layer, "base_layer")


def _adapted(targets: list[str], model: torch.nn.Module) -> set[str]:
    """Returns the paths of the layers that `[lora] targets` name, each by one or more last parts of the path."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    paths, inside = set(), tuple(f"{path}." for path, layer in model.named_modules() if _is_adapted(layer))
    for path, layer in model.named_modules():
        base = getattr(layer, "base_layer", layer)
        # peft adapts linear layers, transformers' Conv1D (a transposed one) included, but not those inside an adapter
        if not (isinstance(base, torch.nn.Linear) or type(base).__name__ == "Conv1D") or path.startswith(inside):
            continue
        parts = path.split(".")
        for target in targets:
            wanted = target.split(".")
            # as many last parts as the pattern has: "q_proj" and "attention.q_proj" name the same layer
            ends = len(wanted) <= len(parts) and all(map(fnmatchcase, parts[-len(wanted) :], wanted))
            # peft's "all-linear" leaves out the output layer
            if (ends and target != "all-linear") or (target == "all-linear" and base is not head):
                paths.add(path)
    return paths


def other_sizes(section: Any, task: Any) -> list[str]:
    """Returns a sentence for each size of a built-in task's model that is not what `[task]` says."""
    made = next((arg for arg in getattr(task.model, "args", ()) if hasattr(arg, "layers")), None)
    sizes = {"context": section.seq_len, **dict(section.model)}
    names = [name for name, size in sizes.items() if size is not None and getattr(made, name, size) != size]
    return [f"[task] says {name}={sizes[name]}, and the model has {getattr(made, name)}" for name in names]


def _reads(seed: int) -> list[str]:
    """Returns [a sentence] unless each sample of each epoch is read with random numbers of its own; else []."""
    seeds = set()
    for epoch in range(2):
        with drawing(seed, epoch, 0) as drawn:
            for sample in range(2):
                drawn.sample(sample)
                seeds.add(torch.default_generator.initial_seed())
    return [] if len(seeds) == 4 else ["samples, or epochs, are read with one another's random numbers"]


def _fast_masks(seed: int) -> list[str]:
    """Returns [a sentence] if two steps, micro-batches or data ranks of `randomness=fast` have one seed; else []."""
    places = list(itertools.product(range(2), repeat=3))
    seeds = set()
    with torch.random.fork_rng(devices=[]):
        for step, micro_batch, rank in places:
            plan = SimpleNamespace(world_size=1, data_ranks=1)
            state: Any = SimpleNamespace(global_random=None, seed=seed, steps_done=step, data_rank=rank, order=None,
                                         plan=plan, data_ranks=1)  # fmt: skip
            seed_masks(state, micro_batch, Share(None, 1, 0, 1))
            seeds.add(torch.default_generator.initial_seed())
    if len(seeds) == len(places):
        return []
    return ["randomness=fast: two steps, micro-batches or data ranks draw their masks from one seed"]


def differences(job: Any, samples: int | None, run_factor: Any, total: int) -> list[str]:
    """Returns a sentence for each setting (steps, rates, schedule) of a job that is not as computed here.

    samples      of the task's data; None if the task makes its batches
    run_factor   the run's schedule: step, from 0 -> factor on the learning rate
    total        steps of the run
    """
    config, told = job.effective.config, []
    expected = steps(config.train, samples, job.batch_samples)
    # None: the number of steps is given, so there is nothing to compute
    if expected is not None and job.steps != expected:
        epochs = f"{config.train.epochs:g} epochs of {samples} samples"
        told.append(f"{epochs} are {expected} steps, and the run has {job.steps}")
    times = rate(config.optimizer, config.train.batch_tokens or job.batch_samples)
    # the rate before scaling: the configuration's, or the task's own optimizer with factor 1
    before = [config.optimizer.lr] if job.lr is not None else _rates(job.with_(lr_factor=1.0).build_task())
    # a configured rate is the same in both of the trial's groups
    for unscaled, made in zip(before * 2 if job.lr is not None else before, _rates(job.build_task()), strict=False):
        if abs(made - times * unscaled) > NEAR * times * unscaled:
            rule = f"scale_lr={config.optimizer.scale_lr}"
            told.append(f"{rule} makes a learning rate of {unscaled:g} {times * unscaled:g}, the run {made:g}")
            break
    told += _adapters(config.lora, job) + _reads(config.train.seed)
    told += _fast_masks(config.train.seed) if config.train.randomness == "fast" else []
    # evenly over the run, and its last step
    looked_at = sorted({total * index // MOST_LOOKED_AT for index in range(MOST_LOOKED_AT)} | {total - 1})
    for step in looked_at:
        if abs(run_factor(step) - factor(config.schedule, total, step)) > NEAR:
            told.append(f"the schedule's factor at step {step + 1} is {factor(config.schedule, total, step):g}, in the "
                        f"run {run_factor(step):g}")  # fmt: skip
            break
    return told
