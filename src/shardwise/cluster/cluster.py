"""`Cluster`, `Device`, `Tier`: pure data. A new figure is also set in catalogue.py and measure/machine.

    tier 0  inside a node          8 devices, NVLink
    tier 1  between nodes          16 nodes, InfiniBand
    ...

The text form is counts (outermost first), a device, and the links between tiers (innermost first):
`"16x8 h100-sxm-80gb, ib-400"`, `"4x18x4 gb200, nvlink-72, ib-400"`. The link inside the innermost tier is the device's
own. Ranks fill the innermost tier first. `host-1tb`, `disk-20tb` and `disk-12gb/s` after them describe a `Node`.
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
BETWEEN = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]  # ops that are measured between nodes
Product = tuple[str, int, int, int, float]  # (dtype or kind, m, n, k, microseconds)
Message = tuple[str, int, int, float]  # (op, ranks, bytes of the full tensor, microseconds)
# (op of BETWEEN, nodes, ranks of each node, bytes of the full tensor, microseconds)
Between = tuple[str, int, int, int, float]
OpTime = tuple[str, float, float]  # (op, bytes, or FLOPs of attention, microseconds)
Factor = tuple[str, float]  # (kind of op, factor on its time)
# (technique, microseconds added to a step, to an op, to an op on sharded tensors, to a unit or message, share of its
# work for which a rank waits for others); see costs/overhead
Overhead = tuple[str, float, float, float, float, float]
# field of `Device` with measured rows -> (types of a row's cells, whether a number may be 0)
ROWS: dict[str, tuple[tuple[type, ...], bool]] = {
    "products": ((str, int, int, int, float), False),
    "ops": ((str, float, float), False),
    "overheads": ((str, float, float, float, float, float), True),
    "factors": ((str, float), False),
}


@dataclass(frozen=True)
class Device:
    """One accelerator, or one CPU rank. Units: TFLOP/s, GB/s (10^9 bytes), GB of memory (10^9 bytes), microseconds."""

    name: str
    bf16_tflops: Figure
    memory_gb: Figure
    memory_bandwidth_gbps: Figure
    fp32_tflops: Figure | None = None  # float32 without tensor cores, torch's default for products
    tf32_tflops: Figure | None = None  # float32 rounded to tf32 on tensor cores, torch's default for convolutions
    fp8_tflops: Figure | None = None
    fp4_tflops: Figure | None = None
    sustained_bf16_tflops: Figure | None = None  # best matrix product in long runs
    # large products in bf16, if fp16 is faster on the device; bf16_tflops and sustained_bf16_tflops are then fp16's
    own_bf16_tflops: Figure | None = None
    host_gbps: Figure | None = None  # link to the host's memory, one direction
    disk_gbps: Figure | None = None  # measured rate of the host's disk
    op_us: Figure | None = None  # an op's cost besides its work, in eager PyTorch
    pace_us: Figure | None = None  # time of a fixed piece of work during the probe (`shardwise.device`)
    correction: Figure | None = None  # measured over forecast step time of a run on this device
    products: tuple[Product, ...] = ()  # matrix products, convolutions, attention, measured on this device itself
    ops: tuple[OpTime, ...] = ()  # all other ops, measured one by one
    overheads: tuple[Overhead, ...] = ()  # time added by Python and the engine, by technique
    factors: tuple[Factor, ...] = ()  # time of ops inside a step over their time alone, by kind
    table: str = ""  # name of the device in gemm.csv, collectives.csv and attention.csv; "": it is in none
    products_of: str = ""  # device of gemm.csv whose dependence on shape is used if this one has no table
    kind: str = "cuda"  # "cuda" or "cpu"

    @property
    def half(self) -> str:
        """Returns the 16-bit precision in which the device is fastest: "fp16", or "bf16" if both are equally fast."""
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
    """What the devices of one host share; None: not known.

    memory_gb  10^9 bytes of the host's memory
    disk_gb    10^9 bytes that are free in the temporary folder
    disk_gbps  10^9 bytes a second of reads and writes there; a measured rate is in `Device.disk_gbps`
    devices    number of devices of one host
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
    name: str = ""  # the text or file it comes from
    collectives: tuple[Message, ...] = ()  # measured inside a node (the innermost tier)
    between: tuple[Between, ...] = ()  # measured between nodes
    node: Node = field(default_factory=Node)  # figures of one host

    @property
    def world_size(self) -> int:
        return math.prod(tier.count for tier in self.tiers)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Returns the number of ranks in one unit of each tier, innermost first: (8, 128) for 16 nodes of 8."""
        out, size = [], 1
        for tier in self.tiers:
            size *= tier.count
            out.append(size)
        return tuple(out)

    def tier_of(self, span: int) -> int:
        """Returns the index of the innermost tier whose units have at least `span` ranks, or of the last tier."""
        for index, size in enumerate(self.sizes):
            if span <= size:
                return index
        return len(self.tiers) - 1

    def computing(self, dtype: str) -> Cluster:
        """Returns the cluster with the rate of `dtype` as `bf16_tflops`; a copy if bf16 is slower than fp16.

        dtype  "bf16" or any other; only "bf16" may have a rate of its own
        """
        own = self.device.own_bf16_tflops
        if dtype != "bf16" or own is None:
            return self
        return replace(self, device=replace(self.device, bf16_tflops=own, sustained_bf16_tflops=own))

    @classmethod
    def parse(cls, text: str | Cluster) -> Cluster:
        """Returns the cluster of a text or of a path that ends in `.toml`; raises `InputError` if it is invalid."""
        if isinstance(text, Cluster):
            return text
        if text.strip().endswith(".toml"):
            return cls.from_toml(Path(text.strip()))
        from shardwise.cluster.cluster_words import parse

        return parse(text)

    @classmethod
    def from_toml(cls, path: Path) -> Cluster:
        """Returns the cluster of a file; raises `InputError` that names a missing, negative or unknown figure."""
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
        """Returns the cluster of a dict as `as_dict` makes it; raises `InputError` that begins with `where`."""
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
        """Returns a dict for TOML and JSON, each figure with its value, kind and source."""
        device = {f.name: getattr(self.device, f.name) for f in fields(Device)}
        tiers = [{f.name: getattr(tier, f.name) for f in fields(Tier)} for tier in self.tiers]
        plain: dict[str, Any] = {"name": self.name, "device": _plain(device), "tiers": [_plain(tier) for tier in tiers]}
        # fields that are not known are left out
        if node := _plain({f.name: getattr(self.node, f.name) for f in fields(Node)}):
            plain["node"] = node
        if self.collectives:
            plain["collectives"] = [list(row) for row in self.collectives]
        if self.between:
            plain["between"] = [list(row) for row in self.between]
        return plain

    def to_toml(self) -> str:
        """Returns the text of a file that `from_toml` reads."""
        import tomli_w

        return tomli_w.dumps(self.as_dict())

    def __str__(self) -> str:
        counts = "x".join(str(tier.count) for tier in reversed(self.tiers))
        links = "".join(f", {tier.name}" for tier in self.tiers[1:])
        return f"{counts} {self.device.name}{links}"


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields for TOML and JSON: figures as dicts, rows as lists, empty values left out."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Figure):
            out[key] = value.as_dict()
        elif isinstance(value, tuple):
            if value:
                out[key] = [list(row) for row in value]
        elif value is not None and value != "":
            out[key] = value
    return out


def _rows(where: str, raw: Any, kinds: tuple[type, ...], nothing: bool = False) -> tuple:
    """Returns measured rows as tuples; raises `InputError` that begins with `where` if a cell is wrong.

    kinds    type of each cell; `nothing`: whether a number may be 0 (if not, it must be above 0)
    """
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
    """Returns the checked rows of a file's `between`; raises `InputError` that names a wrong row."""
    rows = _rows(where, raw, (str, int, int, int, float))
    for index, (op, nodes, *_) in enumerate(rows):
        if op not in BETWEEN:
            raise InputError(f"{where}[{index}]: unknown op {op!r}{did_you_mean(op, BETWEEN)}")
        if nodes < 2:
            raise InputError(f"{where}[{index}]: {nodes} is not a number of nodes that a group crosses: at least 2")
    return rows


def _only(where: str, data: dict[str, Any], allowed: tuple[str, ...]) -> None:
    """Raises `InputError` with the nearest name if a key of `data` is not in `allowed`."""
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
    """Returns the device of a file's table; raises `InputError` that begins with `where` for a wrong key."""
    _only(where, data, tuple(f.name for f in fields(Device)))
    values: dict[str, Any] = {}
    for f in fields(Device):
        # these are text; all other values have a source
        if f.name in ("name", "table", "products_of", "kind"):
            if f.name in data:
                values[f.name] = str(data[f.name])
        elif f.name in ROWS:
            values[f.name] = _rows(f"{where}.{f.name}", data.get(f.name, []), *ROWS[f.name])
        elif f.name in data:
            values[f.name] = Figure.read(f"{where}.{f.name}", data[f.name])
        # only figures in OPTIONAL may be missing
        elif f.name not in OPTIONAL:
            _need(where, data, f.name)
    values["name"] = str(_need(where, data, "name"))
    if values.get("kind", "cuda") not in ("cuda", "cpu"):
        raise InputError(f"{where}.kind is cuda or cpu, got {values['kind']!r}")
    return Device(**values)


def _node(where: str, data: Any) -> Node:
    """Returns the `Node` of a file's table; raises `InputError` that begins with `where`."""
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
    """Returns the `Tier` of a file's table; raises `InputError` that begins with `where`."""
    _table(where, data, Tier)
    return Tier(
        str(_need(where, data, "name")),
        _count(f"{where}.count", _need(where, data, "count")),
        Figure.read(f"{where}.gbps", _need(where, data, "gbps")),
        Figure.read(f"{where}.latency_us", _need(where, data, "latency_us")),
    )
