"""`Software`: how an implementation runs a decoder (kernels, dtypes, overlap); `SOFTWARE` by name; `States` of dtypes.

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
    """Bytes per parameter of a dtype policy. Their sums are the known 16, 18, 20, ...

    weight      weights with which the module computes
    gradient    gradients and the sum over micro-batches
    master      master weights, 0 without
    optimizer   optimizer state
    copies      copies of gradients that live during the optimizer step
    sent        bytes of a gradient on the wire; 0: as in `gradient`
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
        """Returns the bytes per parameter of what the optimizer updates: the master weight, else the weight."""
        return self.master or self.weight

    @property
    def on_wire(self) -> float:
        """Returns the bytes per parameter of a gradient on the wire."""
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

    A bool says whether the sentence holds. "Products" are matrix products.

    attention        "unfused" (scores are written), or a kernel of attention.csv
    fused            norms, activations, dropout and residuals each read and write their tensors once
    fused_adam       the optimizer's step is one kernel, not torch's ops over all tensors
    overlap_dp       gradient reductions run during backward
    overlap_gathers  updated weights are gathered during the next forward (ZeRO 1 and 2), not waited for
    overlap_tp       tensor-parallel collectives run during matrix products
    gathers_per_unit all-gathers of ZeRO-3 for one layer: 1 if its weights are flattened, else one for each parameter
    gathers_again    a recomputed layer's weights are freed after its second forward and gathered again for backward
    copies_us        microseconds of one copy, if a collective returns a tensor for each rank and copies them one by one
    accumulates      the product that makes a weight's gradient adds it into a float32 buffer
    buckets          gradients are copied into the buckets that are sent, or added to them
    bucket           (elements, elements for each data rank): the larger is one message of a reduction or gather (under
                     ZeRO-2 the first); inf: all at once. `by_unit`: a message is a layer instead, as in FSDP
    unit_bytes       bytes that ZeRO-3 copies for each weight in a micro-batch: gathered weights out of their buffer,
                     twice, and gradients into the buffer that is scattered
    selective        what remat=selective recomputes: "attention" (scores, or the kernel: Korthikanti et al. 2022),
                     "elementwise" (all but products and attention), "products" (every second product too), "latents"
                     (queries, keys and values projected from latents: Megatron-Core's mla_up_proj), "activations"
                     (norms and activations: its layernorm and moe_act), or "experts" (norms, and the feed-forward or
                     routing, exchange and experts: its layernorm and moe)
    ring             attention around the ring of cp with balanced causal work, a key of rings.RINGS
    repeats_keys     keys and values are copied for each query head that reads them
    waits            a compiled block waits for each collective of cp at once (functional collectives, traced)
    reorders         a copy puts what sp gathers, or scatters, into the order of samples if there are several
    dtensors         tp is PyTorch's: products keep gathered inputs for their weights' gradients; early sums are in
                     pieces (fused_matmul_reduce_scatter), which are all written and then added up
    sums_once        under ZeRO-2 and 3 gradients stay unsharded until the last micro-batch (FSDP's no_sync)
    pipelines_whole  the same under a pipeline, without overlap, and ZeRO-3 gathers a stage's weights once in a step
    widens           a gradient is copied into the dtype of its sum before it is added
    one_sum          attention and feed-forward that read the same stream are added before tp's one all-reduce of both
    windows          attention skips keys outside of a window; if not, they are masked but computed
    split_sends      a stage's message is sharded over the tensor ranks and gathered by the next stage
    overlap_p2p      stages send while they compute
    overlap_ep       share of a device's multiprocessors that send tokens to experts during compute; 0: compute waits
    dispatch         how tokens reach their experts: "each" copy by itself, "deepep" (a token once to each rank that has
                     some of its experts), or "hybridep" (as deepep, and the exchange pads for FP8)
    joins_experts    experts' activation, and casts of its output, are fused into their grouped products
    drops            experts take a fixed number of tokens and drop the others, so that no sizes are read
    megatron         layers are those of Megatron-Core with Transformer Engine (costs/host_seconds, costs/block)
    graphs           what CUDA graphs replay: "step" (all), "attention" (a layer's part before the experts), "routing"
                     (what routes tokens to experts), both words, or "" (nothing)
    prefetch         when ZeRO-3 gathers the next unit in backward: "before" this unit's gradients are sent (FSDP2),
                     "after" that (FSDP1's BACKWARD_POST), or "none": when it is needed
    states           the dtype policy, a key of STATES
    grad_reduce_bytes bytes of an element in the reduction of gradients
    launch_us        microseconds that a kernel's launch adds on the device
    loss             which operations compute the loss, a key of LOSS_BYTES
    logit_peak_bytes bytes alive for each logit during the loss: 2 in bf16, 4 in float32, and those not in place
    cut_logit_bytes  the same if tp cuts the vocabulary and the loss then runs other operations, else 0
    kept_gathered    matrices over the vocabulary that ZeRO-3 keeps gathered from forward to backward, as FSDP does with
                     weights of no layer: 2, or 1 if output matrix and embedding are separate units
    stops_early      full recompute ends with the last tensor that backward reads, as torch's non-reentrant checkpoint
                     does, so that a dense layer's last product, and tp's message after it, do not run again
    weighs_first     a token's routing weight is applied before its expert's last product (`stops_early` skips that)
    in_parts         full recompute treats norms, attention and feed-forward of a dense layer separately
    in_backward      each parameter is updated as soon as its gradient is there, which is then freed
    workspace_bytes  bytes that libraries (cuBLAS, Transformer Engine) keep inside the allocator
    fp8              how inputs of FP8 or FP4 products are scaled, a key of FP8; "": products in 16 bits
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
        """Returns the number of collectives that reduce or gather `elements` weights of `layers` layers.

        ranks  data ranks of each collective; `stage`: the plan's ZeRO stage
        """
        if self.by_unit or stage.weights:
            return max(1, round(layers))
        # larger messages would keep more unsharded gradients, which matters only if gradients are sharded
        grown = 0.0 if stage.gradients else self.bucket[1] * ranks
        return max(1, math.ceil(elements / max(self.bucket[0], grown)))

    @property
    def bits(self) -> int:
        """Returns the bits of an element that the layers' products read: 16, 8 (FP8) or 4 (FP4)."""
        return FP8[self.fp8].bits if self.fp8 else 16

    @property
    def loss_bytes(self) -> tuple[int, int]:
        """Returns the bytes moved for each logit in (forward, backward) of the loss; a compiled plan has the same."""
        return LOSS_BYTES[self.loss]


# Median bytes that Megatron's tests with Transformer Engine hold beyond the terms of costs/memory, over every other row
# of megatron_ci_golden.csv; scored on the rows between (benchmarks/forecast.py)
TE_WORKSPACE = 0.11 * 2**30

# Megatron's `bucket` if it overlaps reductions (core/distributed/distributed_data_parallel.py): 40M elements, or a
# million for each data rank
MEGATRON_BUCKET = (40e6, 1e6)

# loss -> bytes moved for each bf16 logit in (forward, backward). "fused": read once, float32 written once. "torch", as
# traces have it: cast to float32, log-softmax, picked; filled, softmax, cast back. "parallel", Megatron's
# (core/tensor_parallel/cross_entropy.py): cast, maximum, subtracted, exponents, sum, divided; multiplied, cast back
LOSS_BYTES = {"fused": (6, 6), "torch": (14, 18), "parallel": (2 + 4 + 4 + 8 + 8 + 4 + 8, 8 + 4 + 2)}

# Bytes alive for each logit in PyTorch's loss_parallel: in backward log-probabilities, their gradient, exponents and
# sums, each in float32 (torch/distributed/tensor/parallel/loss)
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


for _name, _of, _changes in VARIANTS:  # in order, since a variant may be of an earlier variant
    SOFTWARE[_name] = replace(SOFTWARE[_of], name=_name, **_changes)


def software(name: str) -> Software:
    """Returns the `Software` of a name; a suffix such as "-fp8" adds a recipe of FP8. Unknown: raises `InputError`."""
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
    """Returns the software with a plan's switches applied: `compile`, `tp_overlap` and `reduce_dtype`."""
    return _switched(software, layout.compile, layout.tp_overlap, layout.reduce_dtype)


@lru_cache(maxsize=64)  # a search asks for each of its layouts, which have a few of them
def _switched(software: Software, compiled: bool, early: bool, reduce_dtype: str) -> Software:
    """Returns the software with ops fused if `compiled`, tp overlapped if `early`, and gradients' sum dtype."""
    return replace(
        software,
        fused=software.fused or compiled,
        overlap_tp=software.overlap_tp or early,
        grad_reduce_bytes=float(BYTES.get(reduce_dtype, software.grad_reduce_bytes)),
    )


def whole_in_pipeline(software: Software, layout: Layout) -> bool:
    """Whether pipeline stages under ZeRO-2 or 3 keep gradients unsharded and reduce them after all micro-batches.

    Under ZeRO-3 they then gather their weights once in a step."""
    return software.pipelines_whole and layout.sharded.gradients and layout.pp > 1


def whole_gradients(software: Software, layout: Layout) -> bool:
    """Whether gradients under ZeRO-2 or 3 stay unsharded until the last micro-batch, and are reduced after it."""
    between = software.sums_once and layout.sharded.gradients and layout.n_micro * layout.rounds > 1
    return between or whole_in_pipeline(software, layout)


def handled_bytes(software: Software, layout: Layout) -> float:
    """Returns the bytes moved per weight in a micro-batch by gradient sums and ZeRO-3's copies."""
    gradient = STATES[software.states].on_wire
    kept = whole_in_pipeline(software, layout)
    if layout.sharded.weights and not kept:
        return software.unit_bytes
    # the plan's stage decides, not `layout.sharded`, since with one rank ZeRO-2 runs the same copies
    if (not STAGES[layout.zero].gradients or kept) and layout.n_micro * layout.rounds > 1:
        widened = 2 * gradient if software.widens else 0  # the cast copy is written, then read for the sum
        return 0.0 if software.accumulates else 2 + 2 * gradient + widened  # gradient read, sum read and written
    return 2 + gradient if software.buckets else 0.0
