"""`plan` and `simulate`, for Python; the command line has them in cli/foresee."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.adapters import with_lora
from shardwise.cluster import Cluster, Device
from shardwise.cluster.catalogue import configuration
from shardwise.config import BUILTINS
from shardwise.config.schema import LoraSection
from shardwise.costs import units
from shardwise.costs.fp8 import FP8
from shardwise.costs.layout import Layout, of_plan
from shardwise.costs.shapes import Shape
from shardwise.costs.software import Software, software
from shardwise.errors import InputError, ShardwiseError
from shardwise.layout import Plan, check
from shardwise.layout.precisions import PRECISIONS
from shardwise.planner import decoders
from shardwise.planner.candidates import Constraints
from shardwise.planner.proposal_text import Search
from shardwise.planner.propose import search
from shardwise.planner.subject import Subject, decoder
from shardwise.progress import Say, silent
from shardwise.simulator.forecast import Forecast
from shardwise.task import Task
from shardwise.task_files import which_task
from shardwise.task_names import AdaptedTask, resolve_task

if TYPE_CHECKING:
    from shardwise.planner.alike_layers import AlikeLayers
    from shardwise.random import Randomness


SLOW_BF16 = (
    "precision={precision}: {device.name} computes large products in bf16 at {device.own_bf16_tflops.value:g} TFLOP/s, "
    "of {device.bf16_tflops.value:g} in fp16, which its tensor cores take: precision=fp16"
)


def is_shape(task: str | Task | Callable[[], Task]) -> bool:
    """Whether `task` is text that names a model without data (a catalogue name or a transformers configuration)."""
    if not isinstance(task, str) or task in BUILTINS or task.endswith((".toml", ".py")):
        return False
    return task.endswith(".json") or Path(task).is_dir() or ":" not in task


def subject_of(
    task: str | Task | Callable[[], Task], cluster: Cluster, *, global_batch: int | str | None = None,
    seq: int | str | None = None, precision: str = "bf16", software_name: str = "shardwise", plan: Plan | None = None,
    say: Say = silent, randomness: Randomness = "global", channels_last: bool | None = None,
) -> Subject:  # fmt: skip
    """Returns the `Subject` of a catalogue name, a `config.json`, or any other task, which is traced.

    A configuration that widths and heads do not describe is built by transformers, without weights, and traced too.

    plan  the only plan that will be forecast, so that a task is traced with exactly its micro-batch; None: any plan
    say   called with lines of progress
    randomness  as in `parallelize`, for dropout in a traced module
    channels_last  whether a configured model's images are in channels_last; None: on accelerators
    global_batch, seq  numbers or texts ("16M-tokens", "8k"); None: the task's own, which a named model lacks

    Raises `InputError` for arguments that the task lacks or does not take, `RefusedPlan` if it has no forecast.
    """
    if randomness not in ("global", "fast"):
        raise InputError(f"randomness is 'global' or 'fast', got {randomness!r}")
    if precision.startswith(("fp8", "mxfp8", "nvfp4", "fp4")):
        raise InputError(
            f"precision={precision}: no plan of this version runs FP8 or FP4; --software {software_name}-fp8 (or "
            f"-mxfp8, -nvfp4) forecasts it for a decoder by its numbers, under precision=bf16"
        )
    soft, precision = software(software_name), Plan(precision=precision).precision
    own = cluster.computing(PRECISIONS[precision].compute)
    # `computing` returns another cluster if bf16 is slower than fp16 on this device
    told = () if own is cluster else (SLOW_BF16.format(precision=precision, device=cluster.device),)
    where = _Where(own, soft, precision, plan, say, randomness, channels_last, told)
    length = None if seq is None else units.count(str(seq), "--seq")
    samples = None if global_batch is None else units.batch(str(global_batch), length)
    # a decoder given by its sizes has formulas; any other model is built and traced
    if isinstance(task, AdaptedTask) and is_shape(task.reference):
        return where.adapted(task.reference, task.section, samples, length)
    if not is_shape(task):
        if length is not None:
            raise InputError("--seq is for decoders by name; a task of your own brings its own batch")
        where.refuse_layout("a task of your own, which has the layout that its model has")
        return where.traced(resolve_task(task), samples)
    assert isinstance(task, str)
    if not (task.endswith(".json") or Path(task).is_dir()):
        if Path(task).is_file():
            raise InputError(f"task {task!r}: {which_task(task)}")
        # the catalogue has sizes of decoders, and configurations of other models
        if (keys := configuration(task)) is not None:
            return where.named(task, keys, samples, length)
        return where.by_numbers(task, decoders.decoder_by_name(task), samples, length)
    return where.of_file(task, samples, length)


@dataclass(frozen=True)
class _Where:
    """The arguments of a forecast except for its task; makes `Subject`s from sizes, by tracing, or a configuration.

    In its methods `samples` is the global batch and `length` the tokens of a sample; None: not given.
    """

    cluster: Cluster
    software: Software
    precision: str
    plan: Plan | None
    say: Say  # called with lines of progress
    randomness: Randomness
    channels_last: bool | None
    remarks: tuple[str, ...] = ()  # lines for people

    def refuse_layout(self, what: str) -> None:
        """Raises `InputError` if channels_last was given; `what`: text on the model, which has no images."""
        if self.channels_last is not None:
            raise InputError(f"--channels-last is for the images of a configuration, not for {what}: leave it out")

    def by_numbers(self, name: str, shape: Shape, samples: int | None, length: int | None) -> Subject:
        """Returns the subject of a decoder given by its sizes; `InputError` without `samples` or `length`."""
        self.refuse_layout(name)
        if self.randomness != "global":
            raise InputError(f"--randomness: {name} is a decoder by its numbers, without dropout: leave it out")
        if length is None or samples is None:
            raise InputError(f"{name} is a decoder by its numbers: give --seq and --global-batch")
        subject = decoder(shape, self.cluster, self.software, samples, length, self.precision)
        return replace(subject, remarks=self.remarks)

    def traced(
        self, task: Task, samples: int | None, remarks: tuple[str, ...] = (), layers: AlikeLayers | None = None
    ) -> Subject:
        """Returns the subject of a task by tracing it; raises `InputError` if the software computes in FP8.

        layers  equal layers, of which only few are traced; None: the whole module is
        """
        from shardwise.planner.traced_layouts import default_samples, traced_subject

        if self.software.fp8:
            recipe = FP8[self.software.fp8]
            raise InputError(
                f"{recipe.name} is forecast for decoders by their numbers alone; for this task, --software "
                f"{self.software.name.removesuffix(recipe.suffix)}"
            )
        where = (self.cluster, self.software, samples, self.precision)
        remarks = (*self.remarks, *remarks)
        if self.plan is None:
            return traced_subject(
                task, *where, say=self.say, remarks=remarks, randomness=self.randomness, layers=layers
            )
        layout = of_plan(self.plan, global_batch=samples or default_samples(task), seq=1, uneven=True)
        # a single plan has a single size of micro-batch, which is traced itself instead of interpolated
        micro = (layout.micro_batch, layout.micro_batch)
        return traced_subject(
            task, *where, (self.plan.remat,), micro, say=self.say, remarks=remarks, randomness=self.randomness,
            layers=layers,
        )  # fmt: skip

    def of_file(self, path: str, samples: int | None, length: int | None) -> Subject:
        """Returns the subject of a `config.json`, by sizes if they describe it, else traced; or raises `InputError`."""
        named = decoders.read_file(path)[0].get("model_type")
        try:
            shape = decoders.decoder_from_config(path)
        except decoders.NotByNumbers as why:
            if not named:  # without model_type, transformers cannot build it either
                raise
            if find_spec("transformers") is None:
                install = "or install transformers, which builds it: pip install 'shardwise[hf]'"
                raise InputError(f"{why}; {install}") from why
            return self._built(path, samples, length)
        remarks: list[str] = []
        # modules may have parameters that the sizes miss, so transformers' own count decides
        # (test_numbers_that_are_not_those_of_the_model_give_way_to_a_trace)
        if named and find_spec("transformers") is not None:
            from shardwise.planner.configured_task import differs

            remarks, other = differs(path, shape)
            if other:
                return self._built(path, samples, length, *remarks)
        return replace(self.by_numbers(path, shape, samples, length), remarks=(*self.remarks, *remarks))

    def adapted(self, named: str, lora: LoraSection, samples: int | None, length: int | None) -> Subject:
        """Returns the subject of a named model with adapters, by tracing it; `InputError` without transformers."""
        if find_spec("transformers") is None:
            raise InputError(f"--lora: {named} is built by transformers: pip install 'shardwise[lora]'")
        if named.endswith(".json") or Path(named).is_dir():
            return self._built(named, samples, length, lora=lora)
        # the catalogue has sizes of decoders, and configurations of other models
        if (keys := configuration(named)) is not None:
            return self.named(named, keys, samples, length, lora)
        from shardwise.planner.decoders import configuration_of

        if length is None:
            raise InputError(f"{named} is a decoder by its numbers: give --seq and --global-batch")
        config = configuration_of(decoders.decoder_by_name(named), length)
        return self._built(named, samples, length, lora=lora, config=config)

    def named(
        self, name: str, keys: dict[str, Any], samples: int | None, length: int | None,
        lora: LoraSection | None = None,
    ) -> Subject:  # fmt: skip
        """Returns the subject of a catalogue model that is no decoder, traced; needs transformers (`InputError`).

        keys  of its transformers configuration
        """
        if find_spec("transformers") is None:
            raise InputError(f"{name} is built by transformers: pip install 'shardwise[hf]'")
        from transformers import AutoConfig

        return self._built(name, samples, length, lora=lora, config=AutoConfig.for_model(**keys))

    def _built(
        self, path: str, samples: int | None, length: int | None, *remarks: str, lora: LoraSection | None = None,
        config: Any = None,
    ) -> Subject:  # fmt: skip
        """Returns the subject of a model that transformers builds, traced on the first made-up sample that it accepts.

        config  the configuration, None: the file or folder `path`. Raises `InputError` if it accepts no sample.
        """
        from shardwise.planner.alike_layers import AlikeLayers, alike_layers, with_layers
        from shardwise.planner.configured_task import configured

        if samples is None:
            raise InputError(f"{path} is a model without data of its own: give --global-batch")
        last = self.cluster.device.kind != "cpu" if self.channels_last is None else self.channels_last
        source = path if config is None else config
        made = configured(source, length, channels_last=last)
        if not made.of_images:
            self.refuse_layout(f"{path}, which has none")
        count = alike_layers(source, made.tasks[0].model, lora)

        def with_adapters(task: Task) -> Task:
            return task if lora is None else with_lora(task, lora)

        def shorter(place: int, layers: int) -> Task:
            few = configured(with_layers(source, layers), length, channels_last=last)
            return with_adapters(few.tasks[place])

        errors: list[InputError] = []
        for place, (task, sample) in enumerate(zip(made.tasks, made.samples, strict=True)):
            layers = AlikeLayers(count, partial(shorter, place)) if count else None
            try:
                subject = self.traced(with_adapters(task), samples, (*remarks, *made.notes), layers)
                # reading=None, since made-up samples say nothing about the time to read real ones
                return replace(subject, sample=sample, head=made.head, reading=None)
            except InputError as error:
                # the model may accept the next kind of sample; if it accepts none, the first error is raised
                errors.append(error)
        raise InputError(f"{path} ({made.tasks[0].name}) on {made.samples[0]}: {errors[0]}{made.hint}") from errors[0]


def plan_for(task: str | Task | Callable[[], Task], plan: str | Plan, device: Device) -> Plan:
    """Returns the parsed plan, with the device's 16-bit precision if its text names none and `task` has no data."""
    parsed = Plan.parse(plan)
    if isinstance(plan, Plan) or not is_shape(task):
        return parsed
    said = Path(plan.strip()).read_text() if plan.strip().endswith(".toml") else plan
    return parsed if "precision" in said else parsed.with_(precision=device.half)


def check_plan(plan: Plan, cluster: Cluster) -> None:
    """Raises `RefusedPlan` for a plan that no version can run, `InputError` if it has more ranks than devices."""
    check(plan, kinds=("illegal",))  # a plan that only a later version can run is forecast, with a remark
    if plan.world_size > cluster.world_size:
        raise InputError(f"plan {plan} needs {plan.world_size} devices; {cluster} has {cluster.world_size}")


def layout_of(plan: Plan, subject: Subject) -> Layout:
    """Returns the plan's layout for the subject's batch, which may be uneven for a task; raises as `of_plan`."""
    return of_plan(plan, global_batch=subject.global_batch, seq=subject.seq, uneven=subject.own)


def plan(
    task: str | Task | Callable[[], Task],
    cluster: str | Cluster,
    *,
    global_batch: int | str | None = None,
    seq: int | str | None = None,
    precision: str | None = None,
    software: str = "shardwise",
    randomness: Randomness = "global",
    constraints: Constraints | None = None,
    channels_last: bool | None = None,
) -> Search:
    """Returns the plans that fit, fastest first, and why other families of plans lost; nothing is run.

    task          a catalogue name ("llama3-8b"), a transformers `config.json`, or a task as `train` takes it
    cluster       "16x8 h100-sxm-80gb, ib-400", a .toml file, or a `Cluster`
    global_batch  samples of a step, or text such as "16M-tokens"; None: the task's own
    seq           tokens of a sample, for a catalogue name or a configuration that reads tokens
    precision     of the plans; None: bf16, or fp16 if the devices' tensor cores take no bf16
    software      name of the implementation that is forecast
    randomness    as in `parallelize`; with "global", attention with dropout cannot use a GPU's fused kernels
    constraints   fixed fields and limits; None: no constraints
    channels_last  whether a configured model's images are in channels_last; None: on accelerators

    Raises `InputError` with the nearest plan if no plan fits.
    """
    where = Cluster.parse(cluster)
    precision = (constraints or Constraints()).precision(precision or where.device.half)
    subject = subject_of(
        task, where, global_batch=global_batch, seq=seq, precision=precision, software_name=software,
        randomness=randomness, channels_last=channels_last,
    )  # fmt: skip
    return search(subject, where, constraints, precision=precision)


def simulate(
    task: str | Task | Callable[[], Task],
    plan: str | Plan,
    cluster: str | Cluster,
    *,
    global_batch: int | str | None = None,
    seq: int | str | None = None,
    software: str = "shardwise",
    randomness: Randomness = "global",
    channels_last: bool | None = None,
) -> Forecast:
    """Returns the forecast of one step of one plan: time by part, memory by stage, timeline, source of each figure.

    plan  text, the path of a .toml file, or a `Plan`; the other arguments are those of `planner.plan`

    Raises `RefusedPlan` for a plan that cannot run, `InputError` for too few devices.
    """
    where = Cluster.parse(cluster)
    parsed = plan_for(task, plan, where.device)
    check_plan(parsed, where)
    subject = subject_of(
        task, where, global_batch=global_batch, seq=seq, precision=parsed.precision, software_name=software,
        plan=parsed, randomness=randomness, channels_last=channels_last,
    )  # fmt: skip
    return possible(subject.simulate(layout_of(parsed, subject)))


def possible(forecast: Forecast) -> Forecast:
    """Returns the forecast, or raises `ShardwiseError` if it is faster than its devices can compute (our defect)."""
    if forecast.impossible:
        raise ShardwiseError(forecast.impossible)
    return forecast
