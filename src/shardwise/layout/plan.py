"""`Plan`: how a task is spread; no torch. A new key: also rules, config/show, costs/layout. Precisions: precisions.

Text form, the same everywhere: `dp_shard=4,zero=3,precision=bf16`. A value that ends in `.toml` is a file with the
same keys. World size = dp_replicate * dp_shard * tp * pp * cp * cp_ulysses * prod(domain); `ep` adds no ranks.
"""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from shardwise.errors import InputError, did_you_mean
from shardwise.layout.precisions import PRECISIONS, TORCH
from shardwise.layout.schedule_kinds import KINDS

REDUCE_DTYPES = ("auto", *TORCH)
REMATS = ("none", "selective", "full")
SCHEDULES = tuple(KINDS)
OFFLOADS = ("none", "optimizer", "parameters", "activations")
DOMAIN_OVERLAPS = ("auto", "always", "never")
CHOICES = {
    "precision": tuple(PRECISIONS),
    "reduce_dtype": REDUCE_DTYPES,
    "remat": REMATS,
    "schedule": ("none", *SCHEDULES),
    "offload": OFFLOADS,
    "domain_overlap": DOMAIN_OVERLAPS,
}
ELSEWHERE = {  # what a technique is called in other libraries, and its keys here
    "dp": "dp_replicate=N (replicas) or dp_shard=N", "ddp": "dp_replicate=N", "fsdp": "dp_shard=N,zero=3",
    "fsdp2": "dp_shard=N,zero=3", "hsdp": "dp_replicate=M,dp_shard=N,zero=3", "mp": "tp=N",
}  # fmt: skip
PIECES = 24  # of a global batch under deterministic=true: 1, 2, 3, 4, 6, 8, 12 or 24 data ranks divide it
FLAGS = ("sp", "tp_overlap", "compile")
ALONG = ("cp", "cp_ulysses")  # axes that cut a sample's positions along one dim, outermost first; `domain` cuts several
DEGREES = (
    "dp_replicate", "dp_shard", "tp", "pp", *ALONG, "ep", "microbatches", "stages_per_rank", "accumulate",
    "position_chunks", "domain_depth",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """How to spread a task: one degree for each mesh axis, plus precision, recompute and the like.

    dp_replicate  replicas of the model (DDP); the outermost axis
    dp_shard      ranks over which `zero` shards; both together are HYBRID_SHARD
    zero          what dp_shard shards: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters
    accumulate    micro-batches in one optimizer step; with pp, each goes through the pipeline in `microbatches`
    pp            stages of ranks that the module is cut into, one after the other
    schedule      order of the pipeline's forwards and backwards; 1f1b by default
    microbatches  pieces in flight in the pipeline; by default as many as stages
    stages        modules at which the stages after the first begin (`layers.3|layers.6`); empty: balanced by cost
    stages_per_rank  stages that each rank of the pipeline runs; by default the schedule's, or as many as `stages` names
    precision     fp32, fp64, bf16 (mixed, fp32 master), bf16-full, fp16 (mixed, with a loss scaler)
    reduce_dtype  dtype in which gradients are summed over ranks; auto: fp32, or fp64 under fp64
    remat         recompute in backward: none, selective (keep matrix products), full (keep block inputs)
    position_chunks  chunks of positions in which wide tensors (of a feed-forward network, of a head and its loss) are
                  computed, one after the other, and again in backward
    compile       torch.compile for each block
    wrap          units of zero=3: class names or module paths (`*` matches one name), `|` between them;
                  empty: repeated blocks are found
    tp            ranks over which weights are cut, as derived from the module (`shardwise show tp`)
    sp            between cut weights, activations are cut along the sequence, on the tp axis
    cp            ranks over which the sequence is cut, with attention around the ring of them
    cp_ulysses    ranks over which the sequence is cut, with attention by heads (all-to-all); inside each rank of cp
    domain        tiles along each dim of space, such as 2x3 or 2x1x2; the first number is of the first such dim
    ep            ranks of dp_shard among which the experts of routed layers are dealt; must divide dp_shard
    domain_overlap  whether convolutions compute while the halo of their tile is on its way: auto (large ones do),
                  always, never
    domain_depth  convolutions that one exchange of halos may serve: their tiles' borders are computed on two ranks
    tp_overlap    sums over tp begin before they are needed, beside other computation
    tp_whole      parameters or modules that tp leaves whole: paths with wildcards, `|` between them
    deterministic  pieces that a global batch is computed in, each alone, their gradients summed in one fixed tree, so
                  that any number of data ranks gives the same bits; true: 24; 0 or false: not asked for
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    zero: int = -1  # -1: the default, 3 where dp_shard > 1, else 0; never left after __post_init__
    tp: int = 1
    sp: bool = False
    pp: int = 1
    schedule: str = "none"  # "none": the default, 1f1b where pp > 1; never left with pp > 1
    microbatches: int = -1  # -1: the default, the number of stages where pp > 1, else 1; never left
    stages: tuple[str, ...] = ()
    stages_per_rank: int = -1  # -1: the default, see `_usual_stages`; never left
    accumulate: int = 1
    cp: int = 1
    cp_ulysses: int = 1
    ep: int = 1
    domain: tuple[int, ...] = (1,)
    precision: str = "fp32"
    reduce_dtype: str = "auto"
    remat: str = "none"
    position_chunks: int = 1
    offload: str = "none"
    compile: bool = False
    wrap: tuple[str, ...] = ()
    domain_overlap: str = "auto"
    domain_depth: int = 1
    tp_overlap: bool = False
    tp_whole: tuple[str, ...] = ()
    deterministic: int = 0

    def __post_init__(self) -> None:
        self._read_pipeline()
        for name in DEGREES:
            value = getattr(self, name)
            if not _is_whole(value) or value < 1:
                raise InputError(f"plan: {name} must be a whole number of at least 1, got {value!r}")
        if isinstance(self.domain, int):
            object.__setattr__(self, "domain", (self.domain,))
        tiles_right = isinstance(self.domain, tuple) and all(_is_whole(tiles) and tiles >= 1 for tiles in self.domain)
        if not tiles_right or not 1 <= len(self.domain) <= 3:
            raise InputError(f"plan: domain must be tiles per spatial dim such as 1x2, got {self.domain!r} (at most 3)")
        ours = next((name for name, row in PRECISIONS.items() if self.precision in row.also), self.precision)
        object.__setattr__(self, "precision", ours)
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                hint = did_you_mean(str(value).replace("float", "fp").replace("bfp", "bf"), list(choices))
                raise InputError(f"plan: {name}={value} is not one of {', '.join(choices)}{hint}")
        for name in ("wrap", "tp_whole"):
            value = getattr(self, name)
            if isinstance(value, str):
                value = tuple(filter(None, value.split("|")))
                object.__setattr__(self, name, value)
            if not isinstance(value, tuple) or not all(isinstance(pattern, str) for pattern in value):
                raise InputError(f"plan: {name} must be names or module paths, got {value!r}")
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"plan: {name} must be true or false, got {getattr(self, name)!r}")
        if isinstance(self.deterministic, bool):
            object.__setattr__(self, "deterministic", PIECES if self.deterministic else 0)
        if not _is_whole(self.deterministic) or self.deterministic < 0:
            raise InputError(f"plan: deterministic must be true or a number of pieces, got {self.deterministic!r}")
        if self.zero == -1:
            object.__setattr__(self, "zero", 3 if self.dp_shard > 1 else 0)
        if not _is_whole(self.zero) or self.zero not in (0, 1, 2, 3):
            raise InputError(f"plan: zero must be 0, 1, 2 or 3, got {self.zero!r}")

    def _read_pipeline(self) -> None:
        """Defaults of schedule and micro-batches, and the form of `stages`."""
        if self.schedule not in CHOICES["schedule"]:
            hint = did_you_mean(str(self.schedule), list(KINDS))
            raise InputError(f"plan: schedule={self.schedule} is not one of {', '.join(CHOICES['schedule'])}{hint}")
        if not _is_whole(self.pp) or self.pp < 1:
            raise InputError(f"plan: pp must be a whole number of at least 1, got {self.pp!r}")
        if isinstance(self.stages, str):
            object.__setattr__(self, "stages", tuple(filter(None, self.stages.split("|"))))
        if not isinstance(self.stages, tuple) or not all(isinstance(path, str) and path for path in self.stages):
            raise InputError(f"plan: stages must be module paths, such as layers.3|layers.6, got {self.stages!r}")
        if self.pp > 1 and self.schedule == "none":
            object.__setattr__(self, "schedule", "1f1b")
        if self.stages_per_rank == -1:
            object.__setattr__(self, "stages_per_rank", self._usual_stages)
        if self.stages and self.stages_per_rank != self._usual_stages:
            raise InputError(
                f"plan: stages names {len(self.stages)} places, which make {self._usual_stages} stages for each of "
                f"pp={self.pp} ranks, not stages_per_rank={self.stages_per_rank}: give one of the two"
            )
        if self.microbatches == -1:
            object.__setattr__(self, "microbatches", self.pp * self.stages_per_rank if self.pp > 1 else 1)

    @property
    def step_microbatches(self) -> int:
        """Micro-batches in one optimizer step: pipelined ones times accumulated ones."""
        return self.accumulate * self.microbatches

    @property
    def _usual_stages(self) -> int:
        """Stages that each rank of the pipeline runs unless a number is given."""
        if self.stages:
            return max(1, (len(self.stages) + 1) // self.pp)
        return KINDS[self.schedule].stages_per_rank if self.pp > 1 else 1

    @property
    def world_size(self) -> int:
        """Ranks that the plan needs."""
        return self.dp_replicate * self.dp_shard * self.tp * self.pp * self.cut_positions

    @property
    def tiles(self) -> int:
        """Ranks over which space is cut."""
        return math.prod(self.domain)

    @property
    def cut_positions(self) -> int:
        """Ranks that share their samples and each hold some of the positions, of a sequence or of space."""
        return self.tiles * math.prod(self.along.values())

    @property
    def along(self) -> dict[str, int]:
        """Axis -> degree, of those that cut positions along one dim."""
        return {name: getattr(self, name) for name in ALONG}

    @property
    def data_ranks(self) -> int:
        """Ranks over which the samples of a micro-batch are dealt."""
        return self.dp_replicate * self.dp_shard

    @classmethod
    def parse(cls, text: str | Plan) -> Plan:
        """Read `"dp_shard=2,zero=3"`, a path ending in `.toml`, or "" / "single" for one process."""
        if isinstance(text, Plan):
            return text
        text = text.strip()
        if text.endswith(".toml"):
            return cls.from_toml(Path(text))
        if text in ("", "single"):
            return cls()
        if (missing := missing_comma(text)) is not None:
            raise InputError(f"plan: {text!r}: {missing}")
        values: dict[str, Any] = {}
        for part in text.split(","):
            key, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals or not value:
                raise InputError(f"plan: {no_pair(part.strip(), text)}")
            if key in values:
                raise InputError(f"plan: {key} is given twice in {text!r}")
            values[key] = _from_text(key, value)
        return cls.from_dict(values)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Plan:
        """Build from keys and values; an unknown key raises `InputError` with the nearest known one."""
        known = {f.name for f in fields(cls)}
        unknown = [key for key in values if key not in known]
        if unknown:
            raise InputError("; ".join(f"plan: unknown key {k!r}{nearest_key(k)}" for k in unknown))
        values = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
        for key, value in values.items():
            if isinstance(value, str) and key in ("domain", "zero", "deterministic", *FLAGS, *DEGREES):
                values[key] = _from_text(key, value)
        return cls(**values)

    @classmethod
    def from_toml(cls, path: Path) -> Plan:
        """Read a TOML file whose keys are the plan's fields, at top level or under `[plan]`."""
        try:
            data = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
        except FileNotFoundError:
            raise InputError(f"plan: no file {path}") from None
        except UnicodeDecodeError:
            raise InputError(f"plan: {path} is no text: give a TOML file with the plan's fields") from None
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"plan: {path} is not TOML: {error}") from None
        return cls.from_dict(data.get("plan", data))

    def as_dict(self, *, defaults: bool = False) -> dict[str, Any]:
        """Fields and values, those at their default left out unless `defaults`."""
        # by default as many micro-batches as this plan has stages, 1f1b, and its schedule's stages
        whole = self.pp * self.stages_per_rank if self.pp > 1 else 1
        base = Plan(dp_shard=self.dp_shard, pp=self.pp, microbatches=whole, stages_per_rank=self._usual_stages)
        items = {f.name: getattr(self, f.name) for f in fields(self)}
        if not defaults:
            always = [*(["dp_shard", "zero"] if self.dp_shard > 1 else []), *(["pp"] if self.pp > 1 else [])]
            items = {k: v for k, v in items.items() if k in always or v != getattr(base, k)}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in items.items()}

    def to_toml(self) -> str:
        """The TOML form, every field written out."""
        import tomli_w

        return tomli_w.dumps({"plan": self.as_dict(defaults=True)})

    def with_(self, **changes: Any) -> Plan:
        """A copy with some fields replaced; a `zero` that is at its default follows the new `dp_shard`."""
        by_default = self.zero == (3 if self.dp_shard > 1 else 0)
        if "dp_shard" in changes and "zero" not in changes and (by_default or changes["dp_shard"] == 1):
            changes["zero"] = -1
        whole = self.pp * self.stages_per_rank if self.pp > 1 else 1
        by_default = self.microbatches == whole or changes.get("pp") == 1
        where = {"pp", "schedule", "stages", "stages_per_rank"} & changes.keys()
        usual = self.stages_per_rank == self._usual_stages or changes.get("pp") == 1
        if where and usual and "stages_per_rank" not in changes:
            changes["stages_per_rank"] = -1
        if where and "microbatches" not in changes and by_default:
            changes["microbatches"] = -1
        if changes.get("pp") == 1:
            changes = {"schedule": "none", "stages": (), "stages_per_rank": -1, **changes}
        return replace(self, **changes)

    def __str__(self) -> str:
        return ",".join(f"{k}={_to_text(k, v)}" for k, v in self.as_dict().items()) or "single"


def missing_comma(text: str) -> str | None:
    """What to say of keys with a space or a semicolon between them; None where there is none."""
    between = r"(?<=[^,;\s])\s*[;\s]\s*(?=\w+\s*=)"
    if not re.search(between, text):
        return None
    return f"a comma is missing between its keys: write {re.sub(between, ',', text)}"


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _from_text(key: str, value: str) -> Any:
    if key == "deterministic" and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if key in (*DEGREES, "zero", "deterministic"):
        try:
            return int(value)
        except ValueError:
            raise InputError(f"plan: {key} must be a whole number, got {value!r}") from None
    if key in FLAGS:
        if value.lower() not in ("true", "false"):
            raise InputError(f"plan: {key} must be true or false, got {value!r}")
        return value.lower() == "true"
    if key == "domain":
        try:
            return tuple(int(part) for part in value.split("x"))
        except ValueError:
            raise InputError(f"plan: domain must be tiles per spatial dim such as 1x2, got {value!r}") from None
    return value


def _to_text(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ("x" if key == "domain" else "|").join(map(str, value))
    return str(value)


def no_pair(part: str, text: str) -> str:
    """What to say of a part of a plan's text that is no `key=value`."""
    if not part:
        return f"there is a comma too many in {text!r}"
    known, number = [field.name for field in fields(Plan)], re.fullmatch(r"([a-z_]+?)_?(\d+)", part)
    told = ""
    if part == "single":
        told = "; single stands alone: leave it out"
    elif part == "auto":
        told = "; `shardwise plan TASK --cluster ...` proposes plans"
    elif part in known:
        told = f"; write {part}=true" if isinstance(getattr(Plan(), part), bool) else f"; give {part} its value"
    elif number is not None and number[1] in known:
        told = f"; write {number[1]}={number[2]}"
    elif part.removesuffix("=") in known:
        told = f"; give {part.removesuffix('=')} its value"
    elif (key := next((name for name, choices in CHOICES.items() if part in choices), None)) is not None:
        told = f"; write {key}={part}"
    return f"expected key=value, got {part!r} in {text!r}{told}"


def nearest_key(word: str) -> str:
    """What follows a word that is no key: the one that is meant, or all there are."""
    if (ours := ELSEWHERE.get(word.lower())) is not None:
        return f"; that is {ours} here"
    known = [field.name for field in fields(Plan)]
    return did_you_mean(word.lower(), sorted(known)) or f" (known: {', '.join(known)})"
