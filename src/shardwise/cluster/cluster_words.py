"""Parses `"16x8 h100-sxm-80gb, ib-400"`: counts outermost first, a device, links between tiers innermost first."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from math import prod

from shardwise.cluster.catalogue import device, host_of, link, link_words
from shardwise.cluster.cluster import Cluster, Node, Tier
from shardwise.cluster.figure import Figure
from shardwise.errors import InputError

MOST = 2**20  # most devices: ten times the largest run that was ever published
OF_NODE = ("host-", "disk-")  # beginnings of words on a node, not on a link
FORM = 'a cluster is written as "16x8 h100-sxm-80gb, ib-400": nodes x devices, the device, the links between tiers'


def parse(text: str) -> Cluster:
    """Returns the cluster of a text; raises `InputError` with the nearest known word if one is not in the catalogue."""
    head, *links = [part.strip() for part in text.split(",")]
    of_node = [word for word in links if word.lower().startswith(OF_NODE)]
    links = [word for word in links if word not in of_node]
    words = head.split()
    if len(words) != 2 or not re.fullmatch(r"\d+(x\d+)*", words[0]):
        raise InputError(f"cluster: cannot read {text!r}; {FORM}, or the path of a .toml file")
    counts = [int(count) for count in reversed(words[0].split("x"))]
    if min(counts) < 1:
        raise InputError(f"cluster: counts must be at least 1, got {words[0]!r}")
    if prod(counts) > MOST:
        raise InputError(f"cluster: {prod(counts):,} devices; up to {MOST:,} are planned for")
    while len(counts) > 1 and counts[-1] == 1 and len(links) < len(counts) - 1:
        counts.pop()  # a single node needs no link
    hardware, own = device(words[1])
    if len(links) != len(counts) - 1:
        # an example with the right number of links that keeps those given
        needed = [*links, *["ib-400"] * len(counts)][: len(counts) - 1]
        raise InputError(
            f"cluster: {words[0]} has {len(counts)} tiers, and links between them: {len(needed)}, behind the device, "
            f"innermost first; got {len(links)} ({', '.join(links) or 'none'}): write "
            f'"{", ".join([" ".join(words), *needed])}"'
        )
    domain = own.count
    tiers = [Tier(own.name, counts[0], own.gbps, own.latency_us)]
    # otherwise devices of different nodes would be planned for as if, for example, NVLink joined them
    if counts[0] > domain:
        raise InputError(
            f"cluster: {counts[0]} {hardware.name} in the innermost tier, but its own link ({own.name}) joins "
            f"{domain}; write {math_split(counts[0], domain)} and name the link between them"
        )
    for level, name in enumerate(links, start=1):
        tiers.append(link(name, counts[level], prod(counts[:level]), own))
    node = _with_words(of_node, host_of(hardware.name, counts[0]))
    return Cluster(hardware, tuple(tiers), text, node=node)


def in_words(cluster: Cluster) -> str:
    """Returns the cluster as text for people, with its number of devices and the rate of each link between nodes."""
    links = [link_words(tier.name, below) for tier, below in zip(cluster.tiers[1:], cluster.sizes, strict=False)]
    return f"{cluster} ({'; '.join([f'{cluster.world_size} devices', *filter(None, links)])})"


def _with_words(words: Iterable[str], node: Node) -> Node:
    """Returns the node with figures from words such as `host-1.5tb`, `disk-20tb`, `disk-12gb/s`; or `InputError`."""
    for word in words:
        match = re.fullmatch(r"(host|disk)-(\d+(?:\.\d+)?)(gb|tb|gb/s)", word.lower())
        # the host's memory has no rate
        if not match or float(match[2]) <= 0 or match[1] + match[3] == "hostgb/s":
            raise InputError(
                f"cluster: cannot read {word!r}: a node's memory is host-1.5tb or host-512gb, the room on its disk "
                "disk-20tb, and its rate disk-12gb/s"
            )
        figure = Figure(float(match[2]) * (1000 if match[3] == "tb" else 1), "given", "the cluster's text")
        if match[1] == "host":
            node = replace(node, memory_gb=figure)
        elif match[3] == "gb/s":
            node = replace(node, disk_gbps=figure)
        else:
            node = replace(node, disk_gb=figure)
    return node


def math_split(count: int, domain: int) -> str:
    """Returns "4x8" for 32 devices in domains of 8, or "NODESx8" if the domains do not divide them."""
    return f"{count // domain}x{domain}" if count % domain == 0 else f"NODESx{domain}"
