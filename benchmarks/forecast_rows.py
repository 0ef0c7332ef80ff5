"""From a row of a published run to a shape, a layout, a cluster and the software that ran it; or why not.

Reads the columns of the files only: what a row does not say is either a fact about the software (its paper says so)
or makes the row one that cannot be scored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from forecast_cells import Row, Skip, number, real
from forecast_ran_on import (
    as_run,
    bridge_recomputes,
    cluster_of,
    device_name,
    fp8_suffix,
    software_name,
    software_of,
    unsaid_chunks,
)

from shardwise.cluster import Cluster, model
from shardwise.cluster import device as devices
from shardwise.costs.fp8 import FP8
from shardwise.costs.kernels import Kernels
from shardwise.costs.layout import Layout
from shardwise.costs.shapes import Shape
from shardwise.costs.software import Software, software
from shardwise.errors import InputError

UNSURE = ("uncertain", "not a measurement", "inconsistent")
OPS = 2_000_000  # of one pipeline
SMALL = 6.5e9  # parameters: the memory of models below is reported apart
# What Megatron's own tests ran on where a row does not say it: 8 GPUs, as in 140 of the 168 that do; of which kind does
# not matter to their memory
CI_GPUS, CI_GPU = 8, "h100-sxm-80gb"
NEAR = 0.03  # a parameter count that is rounded to two digits is as far off as this
FAR = 0.2  # a shape whose parameters are this far from the published count is another model's
# Models by name that are no decoders, and those that have experts: "8x7B", "30B-A3B"
OTHER_MODELS = r"\b(bert|roberta|t5|ul2|bart|vit|clip|mamba|rwkv|whisper|resnet|unet|swin|dit|sdxl|dlrm)\b|diffusion"
EXPERTS = r"\d+x\d+(\.\d+)?b|moe\b|mixture of experts|\d+b-?a\d+(\.\d+)?b"
EXPERT_COLUMNS = ("num_experts", "n_experts", "experts", "moe_ffn")
# Models by name whose attention and feed-forward read the same stream, and through how many norms
PARALLEL = {"neox": 2, "pythia": 2, "falcon": 2, "gpt-j": 1, "palm": 1}
OTHER_WORK = r"\b(q?lora|inference|decoding|cpu offload(ing)?|offload(ing)? on)\b"


@dataclass(frozen=True)
class Case:
    """A row that can be predicted, and what was measured."""

    label: str
    shape: Shape
    layout: Layout
    cluster: Cluster
    software: Software
    seconds: float | None
    memory_gib: tuple[tuple[int, float], ...] = ()  # (stage, GiB)
    memory_is_gb: bool = False
    memory_is_reserved: bool = False
    group: str = ""  # rows with the same group differ in layout alone
    one_layer: bool = False
    open_micro_batch: bool = False  # the row does not say it: the best that fits is taken
    precision: str = "bf16"
    small: bool = False  # reported apart
    told_attention: bool = False  # the row names its attention kernel, which else is assumed to be fused


def case_of(file: str, cells: Mapping[str | None, object]) -> Case:
    """The case of a row; raises `Skip` with the reason."""
    row = _first(Row(cells))
    if row["gpu"]:
        row["gpu"] = as_run(row["gpu"], row["source"] + row["notes"])
    notes = row["notes"].lower()
    for word in UNSURE:
        if word in notes:
            raise Skip(f"its notes say {word}")
    if "mem_max_allocated_gib" in row:
        return _ci(file, row)
    if absent := [column for column in ("model", "gpu") if column not in row]:
        raise Skip(f"not a run: there is no column {' and none '.join(absent)}")
    if not row["model"] or not row["gpu"]:
        raise Skip("neither model nor gpu may be empty")
    if other := re.search(OTHER_WORK, notes):
        raise Skip(f"its notes say {other[0]}, which is not modelled")
    shape = _shape(file, row)
    _as_told(row, shape)
    precision = _precision(row)
    plausible(row, device_name(row["gpu"]))
    layout = _layout(file, row, shape)
    seconds, memory, in_gb = _measured(file, row, shape, layout)
    _possible(seconds, row, shape, layout)
    if seconds is None and not memory:
        raise Skip("neither time nor memory is published")
    return Case(
        label=f"{row['model']} n={row['n_gpus']} tp={layout.tp} pp={layout.pp} cp={layout.cp} dp={layout.dp} "
        f"zero={layout.zero} mb={layout.micro_batch} x{layout.n_micro} s={layout.seq} {layout.recompute} "
        f"{layout.schedule}",
        shape=shape,
        layout=layout,
        cluster=cluster_of(row["gpu"], layout.world_size, f"{row['source']} {notes}".lower()),
        software=software_of(file, row, layout),
        seconds=seconds,
        memory_gib=memory,
        memory_is_gb=in_gb,
        memory_is_reserved=in_gb and ("reserved" in notes or "torchtitan" in row["source"].lower()),
        group=f"{row['model']} {row['gpu']} n={row['n_gpus']} b={row['global_batch']} s={row['seq_len']} "
        f"{row['precision']}".strip(),
        one_layer="one layer" in row["table"],
        open_micro_batch=not row["micro_batch"],
        precision=precision,
        small=shape.parameters < SMALL,
    )


def plausible(row: Mapping[str, str], device: str) -> None:
    """Raise `Skip` where a row claims more than any step reaches: 80% of the device's best steady product."""
    tflops = row["tflops_per_gpu"]
    best = devices(device)[0].sustained_bf16_tflops
    most = 0.8 * best.value * _faster(row, device) if best is not None else math.inf
    if re.fullmatch(r"[\d.]+", tflops) and float(tflops) > most:
        raise Skip(f"{tflops} TFLOP/s of a whole step is above 80% of the best product of {device}, {row['precision']}")


def _faster(row: Mapping[str, str], device: str) -> float:
    """How many times the rate of bf16 the row's precision has at most."""
    bits = next((recipe.bits for recipe in FP8.values() if recipe.suffix == fp8_suffix(row)), 16)
    return Kernels(devices(device)[0], bits=bits).deeper


def _possible(seconds: float | None, row: Mapping[str, str], shape: Shape, layout: Layout) -> None:
    """Raise `Skip` where the step is shorter than the data sheet lets its FLOPs be: a unit or a cell is wrong."""
    if seconds is None or "one layer" in row["table"]:
        return
    name = device_name(row["gpu"])
    peak = devices(name)[0].bf16_tflops.value * _faster(row, name) * 1e12 * layout.world_size
    least = shape.flops_per_token(layout.seq) * layout.global_batch * layout.seq / peak
    if seconds < least:
        raise Skip(f"a step of {seconds:.3g} s is shorter than its FLOPs take at the peak of {name}: {least:.3g} s")


def _as_told(row: Mapping[str, str], shape: Shape) -> None:
    """Raise `Skip` where the row says of its model what the shape is not: no decoder, experts, another size."""
    told = f"{row['model']} {row['notes']}".lower().replace("_", "-")
    if other := re.search(OTHER_MODELS, row["model"].lower().replace("_", "-")):
        raise Skip(f"{other[0]} is not a decoder")
    counted = next((row[name] for name in EXPERT_COLUMNS if row[name] not in ("", "0", "1", "n/a")), "")
    if not shape.experts and (counted or number(row, "ep", 1) > 1 or re.search(EXPERTS, told)):
        raise Skip("the row does not give the shape of its experts or of its compressed attention")
    published = row["params_b"]
    if published and abs(shape.parameters / (real(row, "params_b") * 1e9) - 1) > FAR:
        raise Skip(f"params_b says {published}, and the columns give {shape.parameters / 1e9:.3g}")


def _precision(row: Mapping[str, str]) -> str:
    text = row["precision"].lower()
    if text not in ("", "n/a") and not re.search(r"bf16|bfloat16|fp16|float16|fp8|nvfp4|mixed|amp", text):
        raise Skip(f"precision {row['precision']!r} is not modelled")
    return "bf16"


def _first(row: Row) -> Row:
    """The row with the first of two figures where cells give two: "1 (2)" for two recipes of FP8."""
    if "(" not in row["precision"]:
        return row
    columns = ("tp", "cp", "pp", "vpp", "dp_shard", "tflops_per_gpu", "tokens_per_s_per_gpu")
    return Row({**row, **{name: re.sub(r"(?<=\d) \([\d.]+\)$", "", row[name]) for name in columns}})


def _shape(file: str, row: Mapping[str, str]) -> Shape:
    name = row["model"].lower()
    if latent := re.search(r"deepseek-?(v[23])\b", name):
        return _deepseek(row, latent[1])
    if not row["hidden"] or "mixtral" in name:
        return _by_name(row["model"])
    hidden, heads = number(row, "hidden"), number(row, "heads")
    if hidden % heads:
        raise Skip(f"hidden {hidden} does not divide over {heads} heads")
    llama = any(word in name for word in ("llama", "mistral", "qwen", "mixtral", "smollm", "olmo"))
    mpt = name.startswith("mpt")
    if (named := _named_and_alike(row, hidden, heads)) is not None:
        return named
    # zero-bubble's counts (14.6B and 28.3B, one table) are those of 26 to 35 thousand tokens, as SentencePiece has them
    vocab = number(row, "vocab", 32000 if "schedule=" in row["notes"] else 51200)
    seq = number(row, "seq_len")
    shape = Shape(
        layers=number(row, "layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=number(row, "kv_heads", heads),
        head_dim=hidden // heads,
        ffn=number(row, "ffn", 4 * hidden),
        vocab=vocab,
        gated=llama,
        tied=not llama,
        bias=not llama and not mpt,
        learned_positions=0 if llama else seq,
        layer_norm=not llama,
        norm_bias=not mpt,
        dropout=software_name(file, row) in ("megatron-2021", "zero-bubble", "deepspeed-2021"),
        parallel=next((norms for word, norms in PARALLEL.items() if word in name), 0),
        name=row["model"],
    )
    return _by_count(shape, real(row, "params_b") * 1e9) if row["params_b"] else shape


def _deepseek(row: Mapping[str, str], version: str) -> Shape:
    """DeepSeek's model, or so many of its layers; the row's own figures say whether it predicts more than one token."""
    shape = Shape.from_row(model(f"deepseek-{version}"))
    layers = number(row, "layers", shape.layers)
    if layers < shape.layers:  # SimuMax's launcher: MOE_LAYER_FREQ="([0]*1+[1]*${NUM_LAYERS_MINUS_ONE})*1"
        shape = shape.with_(layers=layers, dense_layers=1)
    if row["tflops_per_gpu"] and row["tokens_per_s_per_gpu"]:
        told, seq = real(row, "tflops_per_gpu") / real(row, "tokens_per_s_per_gpu") * 1e12, number(row, "seq_len")
        tried = [shape, shape.with_(ahead=1)]  # DeepSeek-V3 was trained to predict one token more
        shape = min(tried, key=lambda other: abs(told / other.flops_per_token(seq) - 1))
        if abs(told / shape.flops_per_token(seq) - 1) > NEAR:
            raise Skip("its TFLOP/s over tokens/s are those of another model")
    return shape


def _named_and_alike(row: Mapping[str, str], hidden: int, heads: int) -> Shape | None:
    """The catalogue's shape where the row's own name and figures are one of it: it knows head widths and ties."""
    try:
        found = Shape.from_row(model(row["model"]))
    except InputError:
        return None
    same = (found.layers, found.hidden, found.heads) == (number(row, "layers"), hidden, heads)
    return found if same and found.ffn == number(row, "ffn", found.ffn) and not found.learned_positions else None


def _by_count(shape: Shape, parameters: float) -> Shape:
    """The same with another feed-forward or another head where only that gives the published parameter count."""
    if abs(shape.parameters / parameters - 1) < NEAR:
        return shape
    tried = [shape.with_(gated=gated, tied=tied) for gated in (False, True) for tied in (False, True)]
    best = min(tried, key=lambda other: abs(other.parameters / parameters - 1))
    return best if abs(best.parameters / parameters - 1) < NEAR else shape


def _by_name(name: str) -> Shape:
    """The catalogue's shape, where the row gives a name alone or leaves the experts out."""
    plain = re.sub(r"[_ ]", "-", re.sub(r"\(.*\)", "", name).strip())
    try:
        return Shape.from_row(model(plain))
    except InputError:
        raise Skip("hidden is not published, and the model is not in the catalogue") from None


def _layout(file: str, row: Mapping[str, str], shape: Shape) -> Layout:
    notes = row["notes"]
    n = number(row, "n_gpus")
    # without tp where a row that does not say it has data ranks alone, or weights sharded over all of them
    apart = n == 1 or row["dp"] == str(n) or row["dp_shard"].startswith("3")
    tp, pp, cp = number(row, "tp", 1 if apart else None), number(row, "pp", 1), number(row, "cp", 1)
    dp = number(row, "dp", max(1, n // (tp * pp * cp)))
    micro = number(row, "micro_batch", 1)
    batch = number(row, "global_batch", micro * dp)
    if batch % (micro * dp):
        raise Skip(f"a global batch of {batch} does not divide over {dp} data ranks x micro-batch {micro}")
    stage = re.match(r"\d+", row["dp_shard"] or "0")
    if not stage or 3 < int(stage[0]) != dp * cp:
        raise Skip(f"dp_shard is neither a ZeRO stage nor all data ranks: {row['dp_shard']!r}")
    zero = min(3, int(stage[0]))  # ranks that FSDP shards over, where it is more
    named = re.search(r"schedule=([\w-]+)", notes)
    chunks, schedule = 1 if named else number(row, "vpp", unsaid_chunks(row, shape.layers, pp)), "1f1b"
    stage_layers: tuple[int, ...] = ()
    if named:
        schedule, chunks, stage_layers = _schedule(named[1], shape.layers, pp)
    elif chunks > 1:
        schedule = "interleaved1f1b"
    if pp > 1 and shape.name.startswith("deepseek-v3") and software_name(file, row).startswith("nemo"):
        stage_layers = _bridge(shape.layers, pp * chunks)
    sequence = row["sp"]
    if pp * chunks * (batch // (micro * dp)) > OPS:
        raise Skip(f"a pipeline of {pp} ranks x {chunks} chunks x {batch // (micro * dp)} micro-batches")
    if row["n_gpus"] and tp * pp * cp * dp != n:
        raise Skip(f"tp={tp} x pp={pp} x cp={cp} x dp={dp} are not {n} GPUs")
    return Layout(
        tp=tp,
        sp=sequence.lower() in ("1", "true") if sequence else tp > 1,
        cp=cp,
        pp=pp,
        chunks=chunks,
        ep=number(row, "ep", 1),
        shard=dp,
        zero=zero if dp * cp > 1 else 0,
        micro_batch=micro,
        n_micro=max(1, batch // (micro * dp)),
        seq=number(row, "seq_len"),
        recompute=row["recompute"].lower() or ("selective" if bridge_recomputes(row) else "none"),
        schedule=schedule,
        stage_layers=stage_layers,
    )


def _schedule(name: str, layers: int, pp: int) -> tuple[str, int, tuple[int, ...]]:
    """A zero-bubble row's schedule; the first and the last stage hold one layer less."""
    known = {"1F1B": "1f1b", "1F1B-I": "interleaved1f1b", "ZB-1p": "zbh1", "ZB-2p": "zbh2"}
    if name not in known:
        raise Skip(f"schedule {name} with a profile that the file lacks")
    each = (layers + 2) // pp
    chunks = each if name == "1F1B-I" else 1
    if chunks > 1:
        stages = [1] * (pp * chunks)
        stages[0] = stages[-1] = 0
    else:
        stages = [each] * pp
        stages[0] -= 1
        stages[-1] -= 1
    return known[name], chunks, tuple(stages)


def _bridge(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage as Megatron-Bridge's recipes for DeepSeek-V3 deal them: the last has what is left, and the
    loss; of 32 stages "Et|(tt|)*30mL"."""
    if stages * 2 >= layers + 2:
        return (1, *[2] * (stages - 2), 0) if layers == 2 * stages - 3 else ()
    each = -(-layers // stages)
    rest = layers - each * (stages - 1)
    return (*[each] * (stages - 1), rest) if rest > 0 else ()


def _measured(
    file: str, row: Mapping[str, str], shape: Shape, layout: Layout
) -> tuple[float | None, tuple[tuple[int, float], ...], bool]:
    text = row["step_time_s"]
    seconds = real(row, "step_time_s") if text else None
    tokens = layout.global_batch * layout.seq
    rate = row["tokens_per_s_per_gpu"]
    if seconds is None and rate:
        seconds = tokens / real(row, "tokens_per_s_per_gpu") / layout.world_size
    tflops = row["tflops_per_gpu"]
    if seconds is None and tflops:
        seconds = (
            shape.flops_per_token(layout.seq, _convention(row))
            * tokens
            / (real(row, "tflops_per_gpu") * 1e12 * layout.world_size)
        )
    if seconds is None and row["mfu_pct"]:  # of the data sheet's rate, as PaLM counts where the row does not say how
        name = device_name(row["gpu"])
        rate = real(row, "mfu_pct") / 100 * devices(name)[0].bf16_tflops.value * 1e12
        counted = shape.flops_per_token(layout.seq, _convention(row, "6P+12Lhs"))
        seconds = counted * tokens / (rate * layout.world_size)
    by_rank = re.search(r"max_alloc_MB=\{(.*?)\}", row["notes"])
    memory = row["mem_gb_per_gpu"]
    if by_rank:
        values = [float(item.split(":")[1]) / 1024 for item in by_rank[1].split(",")]
        stages = [
            max(values[r * len(values) // layout.pp : (r + 1) * len(values) // layout.pp]) for r in range(layout.pp)
        ]
        return seconds, tuple(enumerate(stages)), False
    if memory:
        return seconds, ((-1, real(row, "mem_gb_per_gpu")),), True
    return seconds, (), False


def _convention(row: Mapping[str, str], otherwise: str = "") -> str:
    """How the row's FLOPs were counted; its notes say so, or its source is known to."""
    text = (row["source"] + row["notes"]).lower()
    if "hardware" in text or "incl. recompute" in text or "96*" in text:
        return "96Blsh2"
    if "mosaicml" in text or "non-causal" in text:
        return "6P+12Lhs"
    if "nemo" in text or "causal" in text:
        return "6P+6Lhs"
    if otherwise:
        return otherwise
    raise Skip("only TFLOP/s are published, and not by which convention")


def _ci(file: str, row: Mapping[str, str]) -> Case:
    """Megatron's golden values: memory of the last rank of a GPT; models below 7B are marked small."""
    if not row["model"].startswith("gpt/"):
        raise Skip("not a GPT")
    if row["precision"] not in ("bf16", "fp16", "fp8"):  # the first two hold as many bytes
        raise Skip(f"precision {row['precision']}")
    if number(row, "num_experts", 0, least=0) or row["megatron_fsdp"] == "1":
        raise Skip("experts, or Megatron's FSDP")
    if (row["recompute"] or "none") not in ("none", "full", "selective"):
        raise Skip(f"recompute {row['recompute']!r}")
    hidden, heads = number(row, "hidden"), number(row, "heads")
    n = number(row, "n_gpus", CI_GPUS)
    tp, pp, cp = number(row, "tp"), number(row, "pp"), number(row, "cp")
    micro, batch = number(row, "micro_batch"), number(row, "global_batch")
    gated, dp = row["swiglu"] == "1", max(1, n // (tp * pp * cp))
    if batch % (micro * dp):
        raise Skip(f"a global batch of {batch} does not divide over {dp} data ranks x micro-batch {micro}")
    each = number(row, "vpp_layers", 0, least=0)
    layers = number(row, "layers")
    chunks = layers // (pp * each) if each and pp > 1 else 1
    padded = -(-50257 // (128 * tp)) * 128 * tp  # GPT-2's tokenizer, padded as Megatron pads
    shape = Shape(
        layers=layers, hidden=hidden, heads=heads, kv_heads=number(row, "kv_heads"), head_dim=hidden // heads,
        ffn=number(row, "ffn", 4 * hidden), vocab=number(row, "vocab", padded), gated=gated,
        tied=row["untied"] == "0", bias=not gated, layer_norm=True, learned_positions=number(row, "seq_len"),
        dropout=float(row["hidden_dropout"] or 0.1) > 0,
        name=row["model"],
    )  # fmt: skip
    stage_layers = _uneven(row, layers, pp) if chunks == 1 else ()
    if ends := re.search(r"_vp(\d+)_account_for_embedding_loss_in_pipeline_split", row["model"]):
        stage_layers, chunks = _ends_count(layers, pp * int(ends[1])), int(ends[1])
    layout = Layout(
        stage_layers=stage_layers,
        tp=tp, sp=row["sp"] == "1", cp=cp, pp=pp, chunks=chunks, shard=dp, zero=1 if row["dist_opt"] == "1" else 0,
        micro_batch=micro, n_micro=batch // (micro * dp), seq=number(row, "seq_len"), recompute=row["recompute"],
        schedule="interleaved1f1b" if chunks > 1 else "1f1b",
    )  # fmt: skip
    name = device_name(row["gpu"] or CI_GPU)
    found = software(software_name(file, row) + fp8_suffix(row))
    if "unfused" in row["attn"] or row["transformer_impl"] == "local" or _no_fused_kernel(row):
        found = replace(found, attention="unfused")
    return Case(
        f"{row['model']} {row['gpu']}", shape, layout, cluster_of(name, n), found, None,
        ((pp - 1, real(row, "mem_max_allocated_gib")),), small=shape.parameters < SMALL,
        told_attention=bool(row["attn"]),
    )  # fmt: skip


def _no_fused_kernel(row: Mapping[str, str]) -> bool:
    """Whether the row's software had no fused attention that is deterministic, as these tests ask for.

    Their configurations set NVTE_ALLOW_NONDETERMINISTIC_ALGO=0. The long-term image on the clusters that the files call
    dgxa100_dracooci is an early one, with no such kernel beside dropout (assumed); later ones have it.
    """
    return not row["attn"] and "lts_dgxa100_dracooci" in row["table"] and float(row["hidden_dropout"] or 0.1) > 0


def _ends_count(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage where embedding and loss count as one each (Megatron's --account-for-... flags)."""
    if (layers + 2) % stages:
        raise Skip(f"{layers} layers, embedding and loss do not divide over {stages} stages")
    each = (layers + 2) // stages
    return (each - 1, *[each] * (stages - 2), each - 1)


def _uneven(row: Mapping[str, str], layers: int, pp: int) -> tuple[int, ...]:
    """Layers of each stage where the first or the last has others; those between share what is left."""
    first, last = (number(row, f"{end}_stage_layers", 0, least=0) for end in ("first", "last"))
    if pp == 1 or not first + last:
        return ()
    between = pp - bool(first) - bool(last)
    if between and (layers - first - last) % between:
        raise Skip(f"{layers - first - last} layers do not divide over the {between} stages between")
    each = (layers - first - last) // between if between else 0
    return tuple([first] * bool(first) + [each] * between + [last] * bool(last))
