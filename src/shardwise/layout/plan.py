"""`Plan`: the layout of a run over ranks; no torch. A new key: also keys (a need), rules, costs/layout.

Text form, the same everywhere: `dp_shard=4,zero=3,precision=bf16`. A value that ends in `.toml` is a file with the
same keys. World size = dp_replicate * dp_shard * tp * pp * cp * cp_ulysses * prod(domain); `ep` adds no ranks.
"""

from __future__ import annotations

import ast
import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from shardwise.errors import InputError, at_home, did_you_mean, no_keyboard
from shardwise.layout import keys
from shardwise.layout.keys import key, keys_with
from shardwise.layout.offload import canonical, placements
from shardwise.layout.other_words import as_ours, ours_of
from shardwise.layout.precisions import PRECISIONS, TORCH
from shardwise.layout.schedule_kinds import KINDS
from shardwise.layout.zero_stages import STAGES, UNSHARDED, ZeroStage, default_stage

SCHEDULES = tuple(KINDS)
REMATS = ("none", "selective", "full")
PIECES = 24  # of a global batch under deterministic=true: 1, 2, 3, 4, 6, 8, 12 or 24 data ranks divide it
ALONG = ("cp", "cp_ulysses")  # axes that cut a sample's positions along one dim, outermost first; `domain` cuts several


@dataclass(frozen=True)
class Plan:
    """The layout of a run over ranks: one degree for each mesh axis, plus precision, recompute and the like.

    What a key does stands beside its default. dp_replicate is the outermost axis; with dp_shard it is HYBRID_SHARD.
    """

    dp_replicate: int = key(1, "replicas of the model (DDP)", degree=True)
    dp_shard: int = key(1, "ranks over which zero shards", degree=True)
    # -1: the default, 3 where dp_shard > 1, else 0; never left after __post_init__
    zero: int = key(
        -1, f"what dp_shard shards: {', '.join(f'{stage.number} {stage.adds}' for stage in STAGES.values())}"
    )
    tp: int = key(1, "ranks over which weights are cut, as derived from the module", degree=True)
    sp: bool = key(
        False, "between cut weights, activations are cut along the sequence, on the ranks of tp", needs=keys.TP
    )
    pp: int = key(1, "ranks of the pipeline that the module is cut over", degree=True)
    # "none": the default, 1f1b where pp > 1; never left with pp > 1
    schedule: str = key("none", " | ".join(SCHEDULES), choices=("none", *SCHEDULES), needs=keys.PIPELINE)
    # -1: the default, the number of stages where pp > 1, else 1; never left
    microbatches: int = key(-1, "micro-batches in flight in the pipeline", degree=True, needs=keys.PIPELINE)
    stages: tuple[str, ...] = key(
        (), "modules at which the stages after the first begin, as layers.3|layers.6; empty: balanced by cost",
        needs=keys.PIPELINE,
    )  # fmt: skip
    stages_per_rank: int = key(  # -1: the default, see `_usual_stages`; never left
        -1, "stages that each rank of the pipeline runs; by default the schedule's, or as stages names", degree=True,
        needs=keys.PIPELINE,
    )  # fmt: skip
    accumulate: int = key(1, "micro-batches in one optimizer step; with pp, times microbatches", degree=True)
    cp: int = key(1, "ranks over which a sequence is cut, with attention around the ring of them", degree=True)
    cp_ulysses: int = key(
        1, "ranks over which a sequence is cut, with attention by heads; inside each rank of cp", degree=True
    )
    ep: int = key(1, "ranks among which routed experts are dealt; divides dp_shard * cp * cp_ulysses", degree=True)
    domain: tuple[int, ...] = key((1,), "tiles along each dim of space, such as 2x3")
    precision: str = key("fp32", " | ".join(PRECISIONS), choices=tuple(PRECISIONS))
    reduce_dtype: str = key(
        "auto", "dtype in which gradients are summed over ranks; auto: fp32, or fp64 under fp64",
        choices=("auto", *TORCH), rounds=True,
    )  # fmt: skip
    remat: str = key("none", f"{' | '.join(REMATS)}: what backward computes again", choices=REMATS)
    position_chunks: int = key(
        1, "chunks of positions in which wide tensors are computed, and again in backward", degree=True
    )
    offload: str = key(
        "none", "what lies elsewhere until it is used: optimizer, optimizer:disk:0.6, parameters, activations:disk"
    )
    optimizer_state: str = key(
        "full", "how the optimizer's state rests between steps: full | bf16 (rounded by draws) | 8bit (by blocks)",
        choices=("full", "bf16", "8bit"), rounds=True,
    )  # fmt: skip
    masters: str = key(
        "full", "how fp32 masters rest: full | split (the bf16 weights and the half that those lack, bit for bit)",
        choices=("full", "split"), rounds=True,
    )  # fmt: skip
    gradients: str = key(
        "together", "when the optimizer uses gradients: together | as_made (in backward, each freed as it is used)",
        choices=("together", "as_made"), rounds=True,
    )  # fmt: skip
    compile: bool = key(False, "torch.compile for each block", rounds=True)
    wrap: tuple[str, ...] = key(
        (), "units of zero = 3: class names or module paths, | between them; empty: repeated blocks are found",
        needs=keys.GATHERED,
    )  # fmt: skip
    domain_overlap: str = key(
        "auto", "auto | always | never: convolutions compute while the halo of their tile is on its way",
        choices=("auto", "always", "never"), needs=keys.TILES,
    )  # fmt: skip
    domain_depth: int = key(
        1, "convolutions that one exchange of halos may serve, whose tiles' borders two ranks compute", degree=True,
        needs=keys.TILES,
    )  # fmt: skip
    tp_overlap: bool = key(False, "sums over tp begin before they are needed", needs=keys.TP)
    tp_whole: tuple[str, ...] = key(
        (), "parameters or modules that tp leaves whole: paths, * matches one name", needs=keys.TP
    )
    deterministic: int = key(
        0, "pieces that a batch is computed in, for the same bits on any number of data ranks; true: 24; 0: off"
    )

    def __post_init__(self) -> None:
        self._read_pipeline()  # first: `microbatches` and `stages_per_rank` are degrees too, and -1 until it has run
        for name in DEGREES:
            value = getattr(self, name)
            if not _is_whole(value) or value < 1:
                raise InputError(f"plan: {name} must be a whole number of at least 1, got {value!r}")
        if isinstance(self.domain, int):  # a TOML file says domain = 2
            object.__setattr__(self, "domain", (self.domain,))  # past the frozen dataclass, here and below
        tiles_right = isinstance(self.domain, tuple) and all(_is_whole(tiles) and tiles >= 1 for tiles in self.domain)
        if not tiles_right or not 1 <= len(self.domain) <= 3:
            raise InputError(f"plan: domain must be tiles per spatial dim such as 1x2, got {self.domain!r} (at most 3)")
        # other libraries' names are read and not kept: plans compare, and are printed, by ours
        ours = next((name for name, row in PRECISIONS.items() if self.precision in row.also), self.precision)
        object.__setattr__(self, "precision", ours)
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                # torch's names, float16 and bfloat16, are far from ours to a search for spellings
                hint = did_you_mean(str(value).replace("float", "fp").replace("bfp", "bf"), list(choices))
                raise InputError(f"plan: {name}={value} is not one of {', '.join(choices)}{hint}")
        object.__setattr__(self, "offload", canonical(self.offload))
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
        if isinstance(self.deterministic, bool):  # true stands for a number of pieces
            object.__setattr__(self, "deterministic", PIECES if self.deterministic else 0)
        if not _is_whole(self.deterministic) or self.deterministic < 0:
            raise InputError(f"plan: deterministic must be true or a number of pieces, got {self.deterministic!r}")
        if self.zero == -1:
            object.__setattr__(self, "zero", default_stage(self.dp_shard, moved=self.moves_weights))
        if not _is_whole(self.zero) or self.zero not in STAGES:
            *few, last = STAGES
            raise InputError(f"plan: zero must be {', '.join(map(str, few))} or {last}, got {self.zero!r}")

    def _read_pipeline(self) -> None:
        """Fills in defaults of schedule, stages and micro-batches, and splits `stages` if it is a text."""
        if self.schedule not in CHOICES["schedule"]:
            hint = did_you_mean(str(self.schedule), list(KINDS))
            raise InputError(f"plan: schedule={self.schedule} is not one of {', '.join(CHOICES['schedule'])}{hint}")
        if not _is_whole(self.pp) or self.pp < 1:  # before the other degrees: the defaults below are made from it
            raise InputError(f"plan: pp must be a whole number of at least 1, got {self.pp!r}")
        if isinstance(self.stages, str):
            object.__setattr__(self, "stages", tuple(filter(None, self.stages.split("|"))))
        # a plan made in Python or read from TOML may bring anything
        if not isinstance(self.stages, tuple) or not all(isinstance(path, str) and path for path in self.stages):
            raise InputError(f"plan: stages must be module paths, such as layers.3|layers.6, got {self.stages!r}")
        if self.pp > 1 and self.schedule == "none":
            object.__setattr__(self, "schedule", "1f1b")
        if self.stages_per_rank == -1:
            object.__setattr__(self, "stages_per_rank", self._usual_stages)
        # both given: neither may win silently
        if self.stages and self.stages_per_rank != self._usual_stages:
            raise InputError(
                f"plan: stages names {len(self.stages)} places, which make {self._usual_stages} stages for each of "
                f"pp={self.pp} ranks, not stages_per_rank={self.stages_per_rank}: give one of the two"
            )
        if self.microbatches == -1:
            object.__setattr__(self, "microbatches", self.pp * self.stages_per_rank if self.pp > 1 else 1)

    @property
    def step_microbatches(self) -> int:
        """Returns the number of micro-batches in one optimizer step, accumulate * microbatches."""
        return self.accumulate * self.microbatches

    @property
    def _usual_stages(self) -> int:
        """Returns how many stages each rank of the pipeline runs unless a number is given."""
        if self.stages:
            return max(1, (len(self.stages) + 1) // self.pp)
        return KINDS[self.schedule].stages_per_rank if self.pp > 1 else 1

    @property
    def world_size(self) -> int:
        """Returns how many ranks the plan needs."""
        return self.dp_replicate * self.dp_shard * self.tp * self.pp * self.cut_positions

    @property
    def tiles(self) -> int:
        """Returns the number of ranks over which space is cut, the product of `domain`."""
        return math.prod(self.domain)

    @property
    def cut_positions(self) -> int:
        """Returns the number of ranks that have the same samples, each with a share of their positions."""
        return self.tiles * math.prod(self.along.values())

    @property
    def along(self) -> dict[str, int]:
        """Returns axis -> degree, of the axes that cut positions along one dim (cp, cp_ulysses)."""
        return {name: getattr(self, name) for name in ALONG}

    @property
    def sharded(self) -> ZeroStage:
        """Returns the plan's `ZeroStage`, which says what each rank keeps as a shard; stage 0 for groups of one rank.

        Under zero=3 with `moves_weights` one rank has stage 3 too, since it gathers weights from the host or a disk.
        """
        alone = self.dp_shard * self.cut_positions == 1 and not (STAGES[self.zero].weights and self.moves_weights)
        return UNSHARDED if alone else STAGES[self.zero]

    @property
    def moves_weights(self) -> bool:
        """Whether `offload` puts weights on the host or a disk, from which units of zero=3 gather them."""
        return bool(placements(self.offload, "parameters"))

    @property
    def data_ranks(self) -> int:
        """Returns the number of ranks over which the samples of a micro-batch are dealt."""
        return self.dp_replicate * self.dp_shard

    @classmethod
    def parse(cls, text: str | Plan | Mapping[str, Any]) -> Plan:
        """Parses a text: `dp_shard=2,zero=3`, a path ending in `.toml`, "" or "single" (one process).

        A mapping of keys to values, its text, or a `Plan` is accepted too; `InputError` for anything else.
        """
        text = mapping_in(text)
        # a plan, a mapping and a file are taken wherever text is
        if isinstance(text, Plan):
            return text
        if isinstance(text, Mapping):
            return cls.from_dict(dict(text))
        if not isinstance(text, str):
            raise InputError(f"plan: expected text such as 'dp_shard=2,zero=3', got {type(text).__name__}: {text!r}")
        text = text.strip()
        if text.endswith(".toml"):
            return cls.from_toml(Path(at_home(text)))
        if text in ("", "single"):
            return cls()
        # "dp_shard=2 zero=3": without the comma all of it would be one value
        if (missing := missing_comma(text)) is not None:
            raise InputError(f"plan: {text!r}: {missing}")
        values: dict[str, Any] = {}
        for part in text.split(","):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals or not value:
                raise InputError(f"plan: {no_pair(part.strip(), text)}")
            # the second would win silently
            if name in values:
                raise InputError(f"plan: {name} is given twice in {text!r}")
            values[name] = _from_text(name, value)
        return cls.from_dict(values)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Plan:
        """Returns the plan of these keys and values; raises `InputError` for an unknown key, with the nearest one."""
        names = {f.name for f in fields(cls)}
        unknown = [k for k in values if k not in names]
        if unknown:
            raise InputError("; ".join(f"plan: unknown key {k!r}{nearest_key(k, str(values[k]))}" for k in unknown))
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}  # TOML and JSON have lists
        for name, value in values.items():
            if isinstance(value, str) and name in ("domain", "zero", "deterministic", *FLAGS, *DEGREES):
                values[name] = _from_text(name, value)
        return cls(**values)

    @classmethod
    def from_toml(cls, path: Path) -> Plan:
        """Returns the plan in a TOML file, its keys at top level or under `[plan]`; `InputError` for other files."""
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
        """Returns key -> value (tuples as lists), without keys at their default unless `defaults`."""
        # by default as many micro-batches as this plan has stages, 1f1b, and its schedule's stages
        whole = self.pp * self.stages_per_rank if self.pp > 1 else 1
        base = Plan(dp_shard=self.dp_shard, pp=self.pp, microbatches=whole, stages_per_rank=self._usual_stages)
        items = {f.name: getattr(self, f.name) for f in fields(self)}
        if not defaults:
            # `base` has this plan's own dp_shard and pp, from which other defaults follow
            always = [*(["dp_shard", "zero"] if self.dp_shard > 1 else []), *(["pp"] if self.pp > 1 else [])]
            always += ["zero"] if self.moves_weights else []
            items = {k: v for k, v in items.items() if k in always or v != getattr(base, k)}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in items.items()}

    def to_toml(self) -> str:
        """Returns the plan as TOML, every field written out."""
        import tomli_w

        return tomli_w.dumps({"plan": self.as_dict(defaults=True)})

    def with_(self, **changes: Any) -> Plan:
        """Returns a copy with some keys replaced; other keys that were at a default get the default of the new plan."""
        by_default = self.zero == default_stage(self.dp_shard, moved=self.moves_weights)
        # a zero that was chosen goes too where one rank is left, over which a rule refuses it
        if "dp_shard" in changes and "zero" not in changes and (by_default or changes["dp_shard"] == 1):
            changes["zero"] = -1
        whole = self.pp * self.stages_per_rank if self.pp > 1 else 1
        by_default = self.microbatches == whole or changes.get("pp") == 1
        # what was not chosen is a default of the new pipeline again
        where = {"pp", "schedule", "stages", "stages_per_rank"} & changes.keys()
        usual = self.stages_per_rank == self._usual_stages or changes.get("pp") == 1
        if where and usual and "stages_per_rank" not in changes:
            changes["stages_per_rank"] = -1
        if where and "microbatches" not in changes and by_default:
            changes["microbatches"] = -1
        if changes.get("pp") == 1:  # a pipeline's keys without one are refused
            changes = {"schedule": "none", "stages": (), "stages_per_rank": -1, **changes}
        return replace(self, **changes)

    def exact(self, precision: str) -> Plan:
        """Returns the same layout in a precision, without the keys that change rounding alone."""
        return self.with_(precision=precision, **{name: getattr(Plan(), name) for name in keys_with(Plan, "rounds")})

    def __str__(self) -> str:
        return ",".join(f"{k}={_to_text(k, v)}" for k, v in self.as_dict().items()) or "single"


TOLD = keys_with(Plan, "told")
DEGREES = tuple(keys_with(Plan, "degree"))
CHOICES = keys_with(Plan, "choices")
FLAGS = tuple(row.name for row in fields(Plan) if isinstance(row.default, bool))


def mapping_in(value: Any) -> Any:
    """Parses a text in braces (JSON or a Python literal) to a dict; returns any other value unchanged."""
    if not (isinstance(value, str) and value.strip().startswith("{")):
        return value
    # JSON first: `true` is no Python
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(value.strip())
        except (ValueError, SyntaxError):
            # `{}` of other contents (a set) is left to the caller's message
            continue
        if isinstance(found, dict) and all(isinstance(key, str) for key in found):
            return found
    return value


def missing_comma(text: str) -> str | None:
    """Returns the message on keys of `text` that a space or a semicolon separates; None if there are none."""
    between = r"(?<=[^,;\s])\s*[;\s]\s*(?=\w+\s*=)"
    if not re.search(between, text):
        return None
    return f"a comma is missing between its keys: write {re.sub(between, ',', text)}"


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)  # True is an int


def _from_text(key: str, value: str) -> Any:
    """Returns the value of a key from its text: an int, a bool, a tuple of ints (`domain`), else the text itself."""
    if key == "deterministic" and value.lower() in ("true", "false"):  # else a number of pieces
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
    """Returns a value as a plan's text form writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ("x" if key == "domain" else "|").join(map(str, value))
    return str(value)


def no_pair(part: str, text: str) -> str:
    """Returns the message on `part` of a plan's `text` that is no `key=value`, with advice what to write."""
    if not part:
        return f"there is a comma too many in {text!r}"
    # "tp4" or "tp_4"
    names, number = [field.name for field in fields(Plan)], re.fullmatch(r"([a-z_]+?)_?(\d+)", part)
    advice = ""
    # most certain first: a pasted sign that looks like = explains the part whatever else it resembles
    if (sign := no_keyboard(text)) and "=" not in part:
        advice = sign
    elif part.endswith((".json", ".yaml", ".yml")):
        advice = f"; a plan's file is TOML; one of DeepSpeed or Accelerate: shardwise plan --from {part}"
    elif part.isdecimal():
        advice = f"; of {part} ranks: dp_replicate={part} (replicas) or dp_shard={part},zero=3 (weights sharded)"
    elif part == "single":
        advice = "; single stands alone: leave it out"
    elif part == "auto":
        advice = "; `shardwise plan TASK --cluster ...` proposes plans"
    elif part in names:
        advice = f"; write {part}=true" if isinstance(getattr(Plan(), part), bool) else f"; give {part} its value"
    elif number is not None and number[1] in names:
        advice = f"; write {number[1]}={number[2]}"
    elif part.removesuffix("=") in names:
        advice = f"; give {part.removesuffix('=')} its value"
    elif (key := next((name for name, choices in CHOICES.items() if part in choices), None)) is not None:
        advice = f"; write {key}={part}"
    elif ":" in part:
        advice = f"; write {part.replace(':', '=')}"
    elif (ours := ours_of(part)) is not None:
        advice = as_ours(ours)
    return f"expected key=value, got {part!r} in {text!r}{advice}"


def nearest_key(word: str, value: str = "") -> str:
    """Returns the end of a message on an unknown key `word` that was given a `value`: the nearest key, or all keys."""
    # "bf16=true": the word is a value of one of our keys
    key = next((name for name, choices in CHOICES.items() if word in choices), None)
    if key is not None and value.lower() in ("true", "1"):
        return f"; write {key}={word}"
    # then what other tools call it, then the spelling
    if (ours := ours_of(word, value)) is not None:
        return as_ours(ours)
    names = [field.name for field in fields(Plan)]
    return did_you_mean(word.lower(), sorted(names)) or f" (known: {', '.join(names)})"
