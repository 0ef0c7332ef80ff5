"""How an implementation runs a decoder: kernels, dtypes (`STATES`), overlap; `as_planned`: what a plan changes of it.

Facts about programs, from their papers and sources; nothing here is a fitted number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from shardwise.costs.fp8 import FP8
from shardwise.costs.layout import Layout
from shardwise.costs.software_variants import FSDP2_BYTES, VARIANTS
from shardwise.errors import InputError, did_you_mean
from shardwise.layout.flat_buckets import BUCKET_BYTES, ELEMENTS_PER_RANK
from shardwise.layout.precisions import BYTES
from shardwise.layout.zero_stages import STAGES, ZeroStage


@dataclass(frozen=True)
class States:
    """Bytes for one parameter, by class. The known sums (16, 18, 20, ...) are what falls out.

    weight      what the module computes with
    gradient    what backward leaves, and what it is summed in
    master      a second copy for the optimizer, 0 without
    optimizer   its own state
    copies      gradient copies that live beside the first at the optimizer step
    sent        a gradient on the wire, 0 where it is sent as it is held
    """

    name: str
    weight: float
    gradient: float
    master: float
    optimizer: float
    copies: float = 0.0
    sent: float = 0.0

    @property
    def held(self) -> float:
        """Returns the bytes of what the optimizer updates: the master, or the weight without one."""
        return self.master or self.weight

    @property
    def on_wire(self) -> float:
        """Returns bytes of a gradient that is summed over ranks."""
        return self.sent or self.gradient

    @property
    def total(self) -> float:
        return self.weight + self.gradient + self.master + self.optimizer + self.copies


STATES: dict[str, States] = {
    s.name: s
    for s in (
        States("fp32", 4, 4, 0, 8),  # shardwise fp32; PyTorch's default
        States("bf16", 2, 4, 4, 8),  # shardwise bf16, Megatron's main_grad in float32: 18
        States("bf16-grads", 2, 2, 4, 8),  # gradients in bf16, masters and moments in float32
        States("bf16-full", 2, 2, 0, 4),  # everything in bf16
        States("fp16-apex", 2, 2, 4, 8),  # ZeRO paper, DeepSpeed: 16
        States("fp16-apex-fp32-grad", 2, 2, 4, 8, 4),  # a float32 copy of gradients at the step: 20
        States("bf16-deepseek", 2, 4, 4, 4),  # moments in bf16 (DeepSeek-AI 2024, section 3.3.2)
        States("bf16-deepspeed", 2, 6, 4, 8, sent=4),  # float32 sums beside gradients in bf16: 20
        States("fsdp-mixed", 4, 4, 0, 8),  # FSDP with MixedPrecision: float32 shards, bf16 only while gathered
    )
}


@dataclass(frozen=True)
class Software:
    """How one implementation runs a decoder: dtypes, kernels, fusions and overlaps.

    attention        "unfused" (scores are written), or a kernel of attention.csv
    fused            norms, activations, dropout and residuals each read and write their tensors once
    fused_adam       the optimizer's step is one kernel, not torch's ops over all tensors
    overlap_dp       gradient reductions run beside backward
    overlap_gathers  updated weights are gathered beside the next forward (ZeRO 1 and 2), not waited for
    overlap_tp       tensor-parallel collectives run beside matrix products
    gathers_per_unit collectives in which ZeRO-3 gathers one layer: 1 where it is flattened, else one for each parameter
    gathers_again    a recomputed layer's weights are freed after its second forward and gathered again for backward
    copies_us        time of one copy, where a collective hands out one tensor for each rank and copies them one by one
    accumulates      a weight's gradient is added into a float32 buffer by the product that makes it
    buckets          gradients are copied into buckets that are sent, or added to what lies there
    bucket           elements that are summed over data ranks, or gathered, as one message, and how many for each of
                     those ranks, the larger of the two (under ZeRO-2 the first alone); inf: all at once. `by_unit`: a
                     layer, as FSDP shards them
    unit_bytes       bytes that ZeRO-3 moves for each weight in a micro-batch beside what is sent: out of the buffer of
                     gathered weights, twice, and of gradients into the buffer that is scattered
    selective        what remat=selective computes again: "attention" (scores, or the kernel: Korthikanti et al. 2022),
                     "elementwise" (all but products and attention), "products" (every second of them too), or "latents"
                     (queries, keys and values that are made of latents: Megatron-Core's mla_up_proj), "activations"
                     (norms and activations: its layernorm and moe_act), or "experts" (norms, and the feed-forward or
                     routing, exchange and experts: its layernorm and moe)
    ring             attention around the ring of cp, causal work dealt evenly: "even" (one fused kernel), "passed"
                     (one for each block, as here) or "merged" (PyTorch's): costs/rings
    repeats_keys     keys and values are copied for each head of queries that reads them
    waits            what a compiled block sends for cp is waited for where it stands (functional collectives, traced)
    reorders         what sp gathers of several samples is put in their order by a copy, and so is what it scatters
    dtensors         tp by PyTorch's: products keep what sp gathered for their weights' gradients; those begun early are
                     in pieces (fused_matmul_reduce_scatter), which are all written and then added up
    sums_once        under ZeRO-2 and 3 gradients stay whole, and are summed after the last micro-batch (FSDP's no_sync)
    pipelines_whole  so it is under a pipeline, beside nothing, and ZeRO-3 gathers a stage's weights once in a step
    widens           a gradient is copied into the dtype of its sum before it is added
    one_sum          attention and feed-forward that read the same stream are added before tp sums them, as one message
    windows          attention leaves out what lies outside of a window; else that is masked, and computed all the same
    split_sends      a stage's message is cut over the tensor ranks and gathered by the next stage
    overlap_p2p      stages send while they compute
    overlap_ep       share of a device's processors that send rows of experts beside computing; 0: computing waits
    dispatch         how rows reach their experts: "each" copy by itself, "deepep" (a row once to each rank that has
                     some of its experts), or "hybridep" (the same, padded for FP8 on the way)
    joins_experts    experts' activation, and the casts of what is made there, are part of their grouped products
    drops            experts take a fixed number of rows, and more are dropped: no sizes are read on the way
    megatron         layers are those of Megatron-Core with Transformer Engine (costs/host_seconds, costs/block)
    graphs           what is replayed as CUDA graphs, which the host starts as one: a whole "step", what is before the
                     experts of a layer ("attention"), what routes rows to them ("routing"), both, or nothing
    prefetch         when ZeRO-3 asks for the next unit in backward: "before" this one's gradients leave (FSDP2),
                     "after" them (FSDP1's BACKWARD_POST), or "none": when it is needed
    states           the dtype policy, a key of STATES
    launch_us        time a kernel's launch adds on the device
    loss             which operations make the loss, a key of LOSS_BYTES
    logit_peak_bytes bytes alive for one logit when the loss is made: 2 in bf16, 4 in float32, and what is not in place
    cut_logit_bytes  the same where tp cuts the vocabulary and that takes other operations, else 0
    kept_gathered    matrices over the vocabulary that ZeRO-3 keeps gathered from forward to backward, as FSDP does with
                     what no layer has: 2, or 1 where the output matrix is a unit and the embedding another
    stops_early      full recompute ends with the last tensor that backward reads, as torch's non-reentrant checkpoint
                     does: a dense layer's last product is not run again, nor what tp sends of it
    weighs_first     a row is weighed before its expert's last product, so recompute that stops early ends before that
    in_parts         full recompute is of a dense layer's norms, attention and feed-forward apart, whose inputs are kept
    in_backward      each parameter is updated as soon as its gradient is there, which is then freed
    workspace_bytes  what libraries keep for themselves inside the allocator (cuBLAS, Transformer Engine)
    fp8              how inputs of the layers' products are scaled where those are in FP8 or FP4, a key of FP8, else ""
    """

    name: str
    attention: str = "flash2"
    fused: bool = True
    fused_adam: bool = True
    overlap_dp: bool = True
    overlap_gathers: bool = False
    overlap_tp: bool = False
    overlap_p2p: bool = False
    overlap_ep: float = 0.0
    dispatch: str = "each"
    joins_experts: bool = False
    drops: bool = False
    megatron: bool = False
    graphs: str = ""
    prefetch: str = "before"
    gathers_per_unit: int = 1
    gathers_again: bool = False
    copies_us: float = 0.0
    accumulates: bool = True
    buckets: bool = False
    bucket: tuple[float, float] = (math.inf, 0.0)
    by_unit: bool = False
    unit_bytes: float = 0.0
    selective: str = "attention"
    stops_early: bool = False
    in_parts: bool = False
    weighs_first: bool = False
    reorders: bool = False
    dtensors: bool = False
    one_sum: bool = True
    windows: bool = False
    split_sends: bool = False
    ring: str = "even"
    repeats_keys: bool = False
    waits: bool = False
    pipelines_whole: bool = False
    sums_once: bool = False
    widens: bool = False
    states: str = "bf16"
    grad_reduce_bytes: float = 4.0
    launch_us: float = 2.0
    loss: str = "fused"
    logit_peak_bytes: float = 14.0
    cut_logit_bytes: float = 0.0
    kept_gathered: int = 0
    in_backward: bool = False
    workspace_bytes: float = 0.0
    fp8: str = ""
    source: str = ""

    def pieces(self, elements: float, ranks: int, layers: float, stage: ZeroStage) -> int:
        """Returns the number of messages in which `elements` weights of `layers` layers are reduced or gathered."""
        if self.by_unit or stage.weights:
            return max(1, round(layers))
        # where whole gradients stay, no memory speaks against larger ones
        grown = 0.0 if stage.gradients else self.bucket[1] * ranks
        return max(1, math.ceil(elements / max(self.bucket[0], grown)))

    @property
    def bits(self) -> int:
        """Returns how many bits an element has that the layers' products read: 16, 8 (FP8) or 4 (FP4)."""
        return FP8[self.fp8].bits if self.fp8 else 16

    @property
    def loss_bytes(self) -> tuple[int, int]:
        """Returns (bytes that forward moves for one logit, bytes of backward), with compiled blocks too."""
        return LOSS_BYTES[self.loss]


# The median of what Megatron's tests with Transformer Engine hold beyond the terms of costs/memory, of every other row
# of megatron_ci_golden.csv; scored on the rows between (benchmarks/forecast.py)
TE_WORKSPACE = 0.11 * 2**30

# What Megatron sends at a time where it overlaps that (core/distributed/distributed_data_parallel.py): 40M elements, or
# a million for each data rank
MEGATRON_BUCKET = (40e6, 1e6)

# Bytes that forward and backward move of one logit in bf16 until its gradient is there. "fused": read once, float32
# written once. "torch": widened, log-softmax, picked; filled, softmax, narrowed, as traces have it. "parallel", of
# Megatron (core/tensor_parallel/cross_entropy.py): widened, largest, subtracted, exponents, sum, divided; multiplied,
# narrowed
LOSS_BYTES = {"fused": (6, 6), "torch": (14, 18), "parallel": (2 + 4 + 4 + 8 + 8 + 4 + 8, 8 + 4 + 2)}

# PyTorch's loss_parallel: in backward log-probabilities, the gradient of what was picked, exponents and their sum, each
# in float32 (torch/distributed/tensor/parallel/loss)
LOSS_PARALLEL = 16.0

SOFTWARE: dict[str, Software] = {
    s.name: s
    for s in (
        Software(
            "shardwise",
            attention="flash2",
            fused=False,
            fused_adam=False,
            accumulates=False,
            buckets=True,
            bucket=(BUCKET_BYTES / 4, float(ELEMENTS_PER_RANK)),
            unit_bytes=FSDP2_BYTES,
            selective="elementwise",
            reorders=True,
            ring="passed",
            one_sum=False,
            stops_early=True,
            loss="torch",
            states="bf16",
            logit_peak_bytes=12.0,
            source="this package: eager PyTorch, SDPA's flash kernel, fully_shard",
        ),
        Software(
            "megatron-2021",
            attention="unfused",
            overlap_dp=False,
            split_sends=True,
            loss="parallel",
            states="bf16",
            grad_reduce_bytes=2.0,
            source="Narayanan et al. 2021, section 4.2; Korthikanti et al. 2022: fused kernels, no overlap",
        ),
        Software(
            "megatron-core",
            attention="cudnn",
            windows=True,
            megatron=True,
            overlap_dp=False,
            states="bf16",
            logit_peak_bytes=6.0,
            workspace_bytes=TE_WORKSPACE,
            source="Megatron-LM with Transformer Engine at its defaults: nothing overlaps unless a flag says so",
        ),
        Software(
            "nemo",
            attention="cudnn",
            windows=True,
            megatron=True,
            bucket=MEGATRON_BUCKET,
            overlap_gathers=True,
            overlap_tp=True,
            overlap_p2p=True,
            dispatch="deepep",
            states="bf16-grads",
            grad_reduce_bytes=2.0,
            source="NeMo and Megatron-Bridge recipes of their performance tables: gradients in bf16 "
            "(grad_reduce_in_fp32 off); they, gathers and tensor-parallel messages overlap",
        ),
        Software(
            "deepseek",
            attention="cudnn",
            selective="elementwise",
            overlap_gathers=True,
            overlap_p2p=True,
            overlap_ep=20 / 132,
            dispatch="deepep",
            states="bf16-deepseek",
            logit_peak_bytes=6.0,
            source="DeepSeek-V3 (DeepSeek-AI 2024, sections 3.2 and 3.3): rows of experts go once to a node and travel "
            "beside another micro-batch, for which 20 of 132 processors do not compute; moments in bf16",
        ),
        Software(
            "zero-bubble",
            attention="unfused",
            loss="parallel",
            states="fp16-apex-fp32-grad",
            source="Qi et al. 2024: Megatron-LM of 2023, whose scripts ask for fp16, so gradients are summed in it; "
            "their memory is that of written scores and dropout",
        ),
        Software(
            "llm-foundry",
            attention="flash1",
            fused=False,
            fused_adam=False,
            prefetch="after",
            by_unit=True,
            accumulates=False,
            stops_early=True,
            loss="torch",
            states="fsdp-mixed",
            grad_reduce_bytes=2.0,
            source="mosaicml/llm-foundry, FSDP with Composer's BACKWARD_POST, Triton FlashAttention with ALiBi (2023)",
        ),
        Software(
            "fsdp",
            attention="flash2",
            fused=False,
            fused_adam=False,
            by_unit=True,
            accumulates=False,
            selective="elementwise",
            stops_early=True,
            loss="torch",
            states="fsdp-mixed",
            grad_reduce_bytes=2.0,
            kept_gathered=2,
            source="PyTorch FSDP with FlashAttention-2 or SDPA",
        ),
        Software(
            "torchtitan",
            attention="flash2",
            fused=True,
            by_unit=True,
            accumulates=False,
            unit_bytes=FSDP2_BYTES,
            selective="products",
            ring="merged",
            reorders=True,
            dtensors=True,
            repeats_keys=True,
            waits=True,
            pipelines_whole=True,
            states="fsdp-mixed",
            grad_reduce_bytes=4.0,
            stops_early=True,
            weighs_first=True,
            loss="torch",
            logit_peak_bytes=12.0,
            cut_logit_bytes=LOSS_PARALLEL,
            kept_gathered=2,
            source="torchtitan until March 2025: FSDP2, SDPA, torch.compile of all but the loss; selective recompute "
            "of what is elementwise, and of every second product",
        ),
    )
}


for _name, _of, _changes in VARIANTS:  # some are variants of others
    SOFTWARE[_name] = replace(SOFTWARE[_of], name=_name, **_changes)


def software(name: str) -> Software:
    """Returns an implementation by name, with a recipe of FP8 for an ending such as "-fp8"; `InputError` if unknown."""
    for recipe, fp8 in FP8.items():
        if name.removesuffix(fp8.suffix) in SOFTWARE and name.endswith(fp8.suffix):
            plain = SOFTWARE[name.removesuffix(fp8.suffix)]
            return replace(
                plain, name=name, fp8=recipe,
                source=f"{plain.source}; the layers' products in {fp8.name}, each input {fp8.source}: a forecast, no "
                "plan of this version runs it",
            )  # fmt: skip
    if name not in SOFTWARE:
        raise InputError(
            f"no software {name!r}{did_you_mean(name, list(SOFTWARE))} (known: {', '.join(SOFTWARE)}; "
            f"FP8: {', '.join(f'NAME{fp8.suffix}' for fp8 in FP8.values())})"
        )
    return SOFTWARE[name]


def as_planned(software: Software, layout: Layout) -> Software:
    """Returns the software with a plan's switches: fused elementwise ops (compile), early sums of tp, reduce_dtype."""
    return _switched(software, layout.compile, layout.tp_overlap, layout.reduce_dtype)


@lru_cache(maxsize=64)  # a search asks for each of its layouts, which have a few of them
def _switched(software: Software, compiled: bool, early: bool, reduce_dtype: str) -> Software:
    """Returns the software as the plan switches it."""
    return replace(
        software,
        fused=software.fused or compiled,
        overlap_tp=software.overlap_tp or early,
        grad_reduce_bytes=float(BYTES.get(reduce_dtype, software.grad_reduce_bytes)),
    )


def whole_in_pipeline(software: Software, layout: Layout) -> bool:
    """Whether a stage under ZeRO-2 or 3 keeps its gradients whole and sums them once, after all micro-batches.

    Under ZeRO-3 it then gathers its weights once."""
    return software.pipelines_whole and layout.sharded.gradients and layout.pp > 1


def whole_gradients(software: Software, layout: Layout) -> bool:
    """Whether gradients under ZeRO-2 and 3 stay whole until the last micro-batch, and are then summed over ranks."""
    between = software.sums_once and layout.sharded.gradients and layout.n_micro * layout.rounds > 1
    return between or whole_in_pipeline(software, layout)


def handled_bytes(software: Software, layout: Layout) -> float:
    """Returns the bytes moved for each weight in a micro-batch beside its products: gradient sums, ZeRO-3's copies."""
    gradient = STATES[software.states].on_wire
    kept = whole_in_pipeline(software, layout)
    if layout.sharded.weights and not kept:
        return software.unit_bytes
    # the stage that is named, on one rank too, whose gradients are shards by name
    if (not STAGES[layout.zero].gradients or kept) and layout.n_micro * layout.rounds > 1:
        widened = 2 * gradient if software.widens else 0  # a copy in the sum's dtype written, and read to be added
        return 0.0 if software.accumulates else 2 + 2 * gradient + widened  # read, and the sum read and written
    return 2 + gradient if software.buckets else 0.0
