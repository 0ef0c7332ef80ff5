"""Devices, links, hosts and models by name, from the packaged files of data/ (described in its README)."""

from __future__ import annotations

import csv
import json
import re
from functools import cache
from importlib import resources
from typing import Any

from shardwise.cluster.cluster import Device, Node, Tier
from shardwise.cluster.figure import Figure
from shardwise.errors import InputError, did_you_mean

# `key_of` another name of a model -> its name in the catalogue
ALSO = {
    "gpt2": "gpt-2-small", "gpt2124m": "gpt-2-small", "gpt2350m": "gpt-2-medium", "gpt2355m": "gpt-2-medium",
    "gpt2774m": "gpt-2-large", "gpt21.5b": "gpt-2-xl", "gpt21558m": "gpt-2-xl", "nemotron340b": "nemotron-4-340b",
    "nemotron15b": "nemotron-4-15b", "kimik2": "kimi-k2-1t-a32b", "grok1": "grok-1-314b", "dbrx": "dbrx-132b-a36b",
}  # fmt: skip
LINK = r"([a-z]+)-(\d+(?:\.\d+)?)(?:x(\d+))?"  # kind, number, ports that the devices of a node share


def read(name: str) -> list[dict[str, str]]:
    """Returns the rows of a packaged CSV file, each {column: text}."""
    text = (resources.files("shardwise.cluster") / "data" / name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


@cache
def _devices() -> dict[str, dict[str, str]]:
    return {row["name"]: row for row in read("devices.csv")}


@cache
def _capacities() -> dict[str, dict[str, str]]:
    return {row["name"]: row for row in read("capacity.csv")}


def device_names() -> list[str]:
    """Returns the names of devices that a cluster's text may use, sorted."""
    return sorted(_devices())


def device(name: str) -> tuple[Device, Tier]:
    """Returns (device, its own link as a `Tier` whose `count` is the most devices that it joins).

    Raises `InputError` with the nearest name if the catalogue has no such device.
    """
    rows = _devices()
    key = name.lower()
    if key not in rows:
        near = [full for full in rows if full.startswith(key)]
        hint = f"; did you mean '{near[0]}'?" if near else did_you_mean(key, list(rows))
        raise InputError(f"cluster: no device {name!r} in the catalogue{hint} (known: {', '.join(rows)})")
    row = rows[key]
    kind = "assumed" if "uncertain" in row["notes"] else "published"

    def figure(column: str) -> Figure | None:
        return Figure(float(row[column]), kind, row["source"]) if row[column] else None

    values = {c: figure(c) for c in ("bf16_tflops", "memory_gb", "memory_bandwidth_gbps", "fp8_tflops", "fp4_tflops")}
    if (seen := _capacities().get(key)) is not None:  # the "80 GB" of a product are not exact
        values["memory_gb"] = Figure(float(seen["seen_gib"]) * 2**30 / 1e9, "published", seen["source"])
    described = Device(
        name=key,
        sustained_bf16_tflops=figure("sustained_bf16_tflops"),
        own_bf16_tflops=figure("own_bf16_tflops"),
        fp32_tflops=figure("fp32_tflops"),
        tf32_tflops=figure("tf32_tflops"),
        host_gbps=figure("host_gbps"),
        table=row["table"],
        products_of=row["products_of"],
        **values,  # type: ignore[arg-type]
    )
    own = Figure(float(row["link_gbps"]), kind, row["source"])
    joined = max(int(row["link_domain"]), 8 if row["link_domain"] == "1" else 1)  # PCIe joins the devices of a host
    latency = Figure(3.0, "assumed", "one message inside a node, where no table is packaged")
    return described, Tier("pcie" if row["link_domain"] == "1" else "nvlink", joined, own, latency)


def host_of(name: str, count: int) -> Node:
    """Returns memory and disk of a host with `count` devices `name`: those of a published host, or a share of them.

    Returns an empty `Node` if no host with such devices is in the catalogue.
    """
    row = _hosts().get(name)
    if row is None:
        return Node()
    devices = int(row["devices"])
    share = min(1.0, count / devices)

    def figure(column: str) -> Figure | None:
        if not row[column]:
            return None
        # part of a host gets its share, which is an assumption on how hosts are divided
        if share == 1:
            return Figure(float(row[column]), "published", row["source"])
        return Figure(share * float(row[column]), "formula", f"{count} of {devices} parts of {row['source']}")

    rate = Figure(share * float(row["disk_gbps"]), "assumed", row["rate_of"]) if row["disk_gbps"] else None
    return Node(figure("memory_gb"), figure("disk_gb"), rate, devices)


@cache
def _hosts() -> dict[str, dict[str, str]]:
    return {row["device"]: row for row in read("hosts.csv")}


@cache
def _links() -> dict[str, dict[str, str]]:
    return {row["name"]: row for row in read("links.csv")}


def link(name: str, count: int, below: int, own: Tier) -> Tier:
    """Returns a tier of `count` units of `below` devices each, joined by the link `name`.

    `ib-400`, `roce-200`, `efa-400`, `eth-100` give Gb/s for each device. `ib-400x4` is 4 ports of 400 Gb/s that all
    devices of a unit share. `nvlink-72` is a domain of up to 72 devices at the rate of the device's own link (`own`).

    Raises `InputError` for an unknown name, or if a domain would have more devices.
    """
    rows = _links()
    match = re.fullmatch(LINK, name.lower())
    if not match or match[1] not in rows:
        hint = did_you_mean(name.split("-")[0].lower(), list(rows))
        raise InputError(
            f"cluster: no link {name!r}{hint}; a link is ib-400, roce-200, efa-400 or eth-100 (Gb/s for each device), "
            "ib-400x4 (4 ports that the devices of a node share), or nvlink-72 (a rack-scale domain)"
        )
    row, number = rows[match[1]], float(match[2])
    if number <= 0:
        raise InputError(f"cluster: link {name!r} needs a rate above 0")
    if row["number"] == "devices":
        if count * below > number:
            raise InputError(
                f"cluster: {name} joins {number:g} devices, and {count}x{below} are {count * below}: name a link of "
                "more devices, or another link above a smaller domain"
            )
        return Tier(name.lower(), count, own.gbps, own.latency_us)
    share = float(row["line_share"])
    source = f"{number:g} Gb/s line rate x {share} for large messages: a formula, not a measurement"
    port_share = 1.0
    # shared ports: a device cannot use more than one port
    if match[3]:
        port_share = min(1.0, int(match[3]) / below)
        source = f"{match[3]} ports of {source}, shared by {below} devices"
    return Tier(
        name.lower(),
        count,
        Figure(number / 8 * share * port_share, "formula", source),
        Figure(float(row["hop_us"]), "assumed", "a common value of the field"),
    )


def link_words(name: str, below: int) -> str:
    """Returns what the number in a link's name means, such as "eth-100: 100 Gb/s for each device"; "" for NVLink.

    below  devices of each unit that the link joins
    """
    match = re.fullmatch(LINK, name)
    if not match or match[1] not in _links() or _links()[match[1]]["number"] == "devices":
        return ""
    if not match[3]:
        return f"{name}: {match[2]} Gb/s for each device"
    ports = "1 port" if match[3] == "1" else f"{match[3]} ports"
    return f"{name}: {ports} of {match[2]} Gb/s, shared by {below} devices"


# --- models


def key_of(name: str) -> str:
    """Returns a key that is equal for spellings of one model, such as `Llama-3.1-405B` and `llama3-405b`."""
    text = re.sub(r"(?<=\d)\.\d+(?=-)", "", name.lower().replace("_", "-"))
    return re.sub(r"[^a-z0-9.]", "", text)


@cache
def _models() -> dict[str, dict[str, str]]:
    return {row["name"]: row for row in read("models.csv")}


def model_names() -> list[str]:
    """Returns the names of the packaged decoders, sorted."""
    return sorted(_models())


def model(name: str) -> dict[str, str]:
    """Returns a decoder's row of models.csv as {column: text}; raises `InputError` with the nearest name."""
    rows = _models()
    name = ALSO.get(key_of(name), name)
    if name.lower() in rows:
        return rows[name.lower()]
    for full, row in rows.items():
        if key_of(full) == key_of(name):
            return row
    hint = did_you_mean(name.rpartition("/")[2].lower(), [*rows, *_configurations()])
    raise InputError(
        f"no model {name!r} in the catalogue of {len(rows)} decoders and {len(_configurations())} others{hint}; "
        "nothing is fetched from a hub: any other of transformers is planned by its config.json, whose path is given"
    )


@cache
def _configurations() -> dict[str, dict[str, Any]]:
    text = (resources.files("shardwise.cluster") / "data" / "configurations.json").read_text(encoding="utf-8")
    return json.loads(text)


def configuration(name: str) -> dict[str, Any] | None:
    """Returns the keys of a transformers configuration of a packaged model that is no decoder, or None."""
    return next((keys for full, keys in _configurations().items() if key_of(full) == key_of(name)), None)
