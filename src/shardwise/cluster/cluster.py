"""`Cluster`, `Device`, `Tier`: pure data. A new figure is also filled in by catalogue.py and measure/machine.

    tier 0  inside a node          8 devices, NVLink
    tier 1  between nodes          16 of them, InfiniBand
    ...

The text form is counts, a device and the links between tiers, innermost first: `"16x8 h100-sxm-80gb, ib-400"`,
`"4x18x4 gb200, nvlink-72, ib-400"`. The link inside the innermost tier is the device's own. Ranks fill the
innermost tier first. `host-1tb`, `disk-20tb` and `disk-12gb/s` behind them say what a node has (`Node`).
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from shardwise.cluster.figure import Figure
from shardwise.errors import InputError, did_you_mean

OPTIONAL = (
    "fp8_tflops",
    "fp4_tflops",
    "sustained_bf16_tflops",
    "own_bf16_tflops",
    "fp32_tflops",
    "tf32_tflops",
    "host_gbps",
    "op_us",
    "correction",
    "disk_gbps",
    "pace_us",
)
BETWEEN = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]  # what is measured between nodes
Product = tuple[str, int, int, int, float]  # dtype, m, n, k, microseconds
Message = tuple[str, int, int, float]  # op, ranks, bytes, microseconds
# op ("send" too), nodes, ranks of each node, bytes, microseconds
Between = tuple[str, int, int, int, float]
OpTime = tuple[str, float, float]  # op, bytes (FLOPs of convolutions and attention), microseconds
Factor = tuple[str, float]  # kind of op, factor on its time
# technique; microseconds of a step, of an op, of an op on cut tensors, of a unit or message; share of its work that a
# rank waits for others
Overhead = tuple[str, float, float, float, float, float]
# of a device's lists of measured rows: what the cells are, and whether a number may be 0
ROWS: dict[str, tuple[tuple[type, ...], bool]] = {
    "products": ((str, int, int, int, float), False),
    "ops": ((str, float, float), False),
    "overheads": ((str, float, float, float, float, float), True),
    "factors": ((str, float), False),
}


@dataclass(frozen=True)
class Device:
    """One accelerator (or one CPU rank). Rates per second: tera-FLOPs, giga-bytes; memory in 10^9 bytes."""

    name: str
    bf16_tflops: Figure
    memory_gb: Figure
    memory_bandwidth_gbps: Figure
    fp32_tflops: Figure | None = None  # of float32 as torch multiplies it by default, without tensor cores
    tf32_tflops: Figure | None = None  # of convolutions of float32, which torch has tensor cores round
    fp8_tflops: Figure | None = None
    fp4_tflops: Figure | None = None
    sustained_bf16_tflops: Figure | None = None  # best matrix product at steady clocks
    # of large products in bf16, where tensor cores take fp16 alone, or faster: then the two others are fp16's
    own_bf16_tflops: Figure | None = None
    host_gbps: Figure | None = None
    disk_gbps: Figure | None = None
    op_us: Figure | None = None  # what an op costs besides its work, in eager PyTorch
    pace_us: Figure | None = None  # what a fixed piece of work took while it was probed (`shardwise.device`)
    correction: Figure | None = None  # measured over forecast step time of a run here
    products: tuple[Product, ...] = ()  # matrix products measured on this very device
    ops: tuple[OpTime, ...] = ()  # all other ops, measured one by one
    overheads: tuple[Overhead, ...] = ()  # what Python and the engine add, technique by technique
    factors: tuple[Factor, ...] = ()  # what ops take inside a step, over what they take alone, by kind
    table: str = ""  # under which name matrix products and collectives are tabulated
    products_of: str = ""  # whose table says how products hang on their shape, where this device has none
    kind: str = "cuda"  # cuda or cpu

    @property
    def half(self) -> str:
        """Returns the precision of 16 bits in which the device is fastest, "bf16" where both are alike."""
        return "bf16" if self.own_bf16_tflops is None else "fp16"

    @property
    def memory_bytes(self) -> float:
        """Returns the device's memory in bytes; the driver's context takes some (`costs.memory.CONTEXT_BYTES`)."""
        return self.memory_gb.value * 1e9


@dataclass(frozen=True)
class Tier:
    """`count` units of the tier below, joined by a link.

    gbps         GB/s in one direction, for each device
    latency_us   one message
    """

    name: str
    count: int
    gbps: Figure
    latency_us: Figure


@dataclass(frozen=True)
class Node:
    """What the devices of one host share, in 10^9 bytes; None where no figure is known.

    memory_gb  of the host
    disk_gb    free where temporary files go
    disk_gbps  of reads and writes there, a second; what was measured stands at the device
    devices    of one host
    """

    memory_gb: Figure | None = None
    disk_gb: Figure | None = None
    disk_gbps: Figure | None = None
    devices: int | None = None


@dataclass(frozen=True)
class Cluster:
    """Devices and tiers, innermost first. `world_size` is the product of the tiers' counts."""

    device: Device
    tiers: tuple[Tier, ...]
    name: str = ""  # as its file or the user calls it
    collectives: tuple[Message, ...] = ()  # measured here, inside the innermost tier
    between: tuple[Between, ...] = ()  # and over several of its units, which are nodes
    node: Node = field(default_factory=Node)  # figures of one host

    @property
    def world_size(self) -> int:
        return math.prod(tier.count for tier in self.tiers)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Returns how many ranks one unit of each tier has, innermost first: (8, 128) for 16 nodes of 8."""
        out, size = [], 1
        for tier in self.tiers:
            size *= tier.count
            out.append(size)
        return tuple(out)

    def tier_of(self, span: int) -> int:
        """Returns the index of the innermost tier that holds `span` consecutive ranks, the last where none does."""
        for index, size in enumerate(self.sizes):
            if span <= size:
                return index
        return len(self.tiers) - 1

    def computing(self, dtype: str) -> Cluster:
        """Returns the cluster with its devices' rate in `dtype`: another one where bf16's is not that of fp16."""
        own = self.device.own_bf16_tflops
        if dtype != "bf16" or own is None:
            return self
        return replace(self, device=replace(self.device, bf16_tflops=own, sustained_bf16_tflops=own))

    @classmethod
    def parse(cls, text: str | Cluster) -> Cluster:
        """Returns the cluster of a text, or of a path that ends in `.toml`; `InputError` where it is wrong."""
        if isinstance(text, Cluster):
            return text
        if text.strip().endswith(".toml"):
            return cls.from_toml(Path(text.strip()))
        from shardwise.cluster.cluster_words import parse

        return parse(text)

    @classmethod
    def from_toml(cls, path: Path) -> Cluster:
        """Returns the cluster in a file; `InputError`, with its place, for a missing, negative or unknown figure."""
        try:
            data = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
        except FileNotFoundError:
            raise InputError(f"cluster: no file {path}; `shardwise probe -o {path}` measures this machine") from None
        except OSError as error:
            raise InputError(f"cluster: {path} cannot be read: {error.strerror}; give a .toml file") from None
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"cluster: {path} is not TOML: {error}") from None
        return cls.from_dict(data, str(path))

    @classmethod
    def from_dict(cls, data: dict[str, Any], where: str = "cluster") -> Cluster:
        """Returns the cluster of `{device: {...}, tiers: [{...}]}`; `InputError`, naming `where`, for a wrong one."""
        _only(where, data, ("name", "device", "tiers", "collectives", "between", "node"))
        if not isinstance(data.get("device"), dict) or not isinstance(data.get("tiers"), list) or not data["tiers"]:
            raise InputError(f"{where}: a cluster has a [device] and one or more [[tiers]]")
        tiers = tuple(_tier(f"{where}: tiers[{i}]", raw) for i, raw in enumerate(data["tiers"]))
        messages = _rows(f"{where}: collectives", data.get("collectives", []), (str, int, int, float))
        between = _between(f"{where}: between", data.get("between", []))
        node = _node(f"{where}: node", data.get("node", {}))
        device = _device(f"{where}: device", data["device"])
        return cls(device, tiers, str(data.get("name", "")), messages, between, node)

    def as_dict(self) -> dict[str, Any]:
        """Returns the TOML and JSON form, every number with its provenance."""
        device = {f.name: getattr(self.device, f.name) for f in fields(Device)}
        tiers = [{f.name: getattr(tier, f.name) for f in fields(Tier)} for tier in self.tiers]
        plain: dict[str, Any] = {"name": self.name, "device": _plain(device), "tiers": [_plain(tier) for tier in tiers]}
        # only what is known: a file written by `probe` has what it measured
        if node := _plain({f.name: getattr(self.node, f.name) for f in fields(Node)}):
            plain["node"] = node
        if self.collectives:
            plain["collectives"] = [list(row) for row in self.collectives]
        if self.between:
            plain["between"] = [list(row) for row in self.between]
        return plain

    def to_toml(self) -> str:
        """Returns the file that `from_toml` reads."""
        import tomli_w

        return tomli_w.dumps(self.as_dict())

    def __str__(self) -> str:
        counts = "x".join(str(tier.count) for tier in reversed(self.tiers))
        links = "".join(f", {tier.name}" for tier in self.tiers[1:])
        return f"{counts} {self.device.name}{links}"


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields as TOML and JSON hold them: figures as tables, rows as lists; empty ones left out."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Figure):
            out[key] = value.as_dict()
        # of rows that were not measured nothing is written
        elif isinstance(value, tuple):
            if value:
                out[key] = [list(row) for row in value]
        elif value is not None and value != "":
            out[key] = value
    return out


def _rows(where: str, raw: Any, kinds: tuple[type, ...], nothing: bool = False) -> tuple:
    """Returns measured rows as tuples with cells of `kinds`, numbers above 0, or 0 too where `nothing`; else raises."""
    if not isinstance(raw, list):
        raise InputError(f"{where} must be a list of rows, got {raw!r}")
    out = []
    for index, row in enumerate(raw):
        if not isinstance(row, list) or len(row) != len(kinds):
            raise InputError(
                f"{where}[{index}] must have {len(kinds)} cells, got {row!r}; "
                "`shardwise probe` writes a file of this version"
            )
        for cell, kind in zip(row, kinds, strict=True):
            # `type() is`, not isinstance: a bool would pass as a number
            right = type(cell) is kind or (kind is float and type(cell) is int)
            if not right or (kind is not str and not (math.isfinite(cell) and (cell > 0 or (nothing and cell == 0)))):
                least = "of at least" if nothing else "above"
                raise InputError(f"{where}[{index}]: {cell!r} is not a {kind.__name__} {least} 0")
        out.append(tuple(row))
    return tuple(out)


def _between(where: str, raw: Any) -> tuple[Between, ...]:
    """Returns the rows of a file's `between`, checked; `InputError` names the row."""
    rows = _rows(where, raw, (str, int, int, int, float))
    for index, (op, nodes, *_) in enumerate(rows):
        if op not in BETWEEN:
            raise InputError(f"{where}[{index}]: unknown op {op!r}{did_you_mean(op, BETWEEN)}")
        if nodes < 2:
            raise InputError(f"{where}[{index}]: {nodes} is not a number of nodes that a group crosses: at least 2")
    return rows


def _only(where: str, data: dict[str, Any], allowed: tuple[str, ...]) -> None:
    """Raise `InputError`, with the nearest name, for a key of a file's table that is not `allowed`."""
    for key in data:
        if key not in allowed:
            raise InputError(
                f"{where}: unknown key {key!r}{did_you_mean(key, list(allowed))} (known: {', '.join(allowed)})"
            )


def _need(where: str, data: dict[str, Any], key: str) -> Any:
    if key not in data:
        raise InputError(f"{where}: {key} is missing")
    return data[key]


def _device(where: str, data: dict[str, Any]) -> Device:
    """Returns the device in a table of a cluster's file; `InputError`, naming `where`, for missing or unknown keys."""
    _only(where, data, tuple(f.name for f in fields(Device)))
    values: dict[str, Any] = {}
    for f in fields(Device):
        # names are text; all else has a unit and a source
        if f.name in ("name", "table", "products_of", "kind"):
            if f.name in data:
                values[f.name] = str(data[f.name])
        elif f.name in ROWS:
            values[f.name] = _rows(f"{where}.{f.name}", data.get(f.name, []), *ROWS[f.name])
        elif f.name in data:
            values[f.name] = Figure.read(f"{where}.{f.name}", data[f.name])
        # a figure that a device must have; the rest may be unknown
        elif f.name not in OPTIONAL:
            _need(where, data, f.name)
    values["name"] = str(_need(where, data, "name"))
    if values.get("kind", "cuda") not in ("cuda", "cpu"):
        raise InputError(f"{where}.kind is cuda or cpu, got {values['kind']!r}")
    return Device(**values)


def _node(where: str, data: Any) -> Node:
    """Returns the figures of one host in a file; `InputError` names what is wrong."""
    _table(where, data, Node)
    sizes = {
        name: Figure.read(f"{where}.{name}", data[name])
        for name in ("memory_gb", "disk_gb", "disk_gbps")
        if name in data
    }
    devices = _count(f"{where}.devices", data["devices"]) if "devices" in data else None
    return Node(**sizes, devices=devices)


def _table(where: str, data: Any, kind: type) -> None:
    if not isinstance(data, dict):
        raise InputError(f"{where} must be a table, got {data!r}")
    _only(where, data, tuple(f.name for f in fields(kind)))


def _count(where: str, raw: Any) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int) or raw < 1:
        raise InputError(f"{where} must be a whole number of at least 1, got {raw!r}")
    return raw


def _tier(where: str, data: Any) -> Tier:
    """Returns one tier of a file; `InputError` names what is missing or wrong."""
    _table(where, data, Tier)
    return Tier(
        str(_need(where, data, "name")),
        _count(f"{where}.count", _need(where, data, "count")),
        Figure.read(f"{where}.gbps", _need(where, data, "gbps")),
        Figure.read(f"{where}.latency_us", _need(where, data, "latency_us")),
    )
