"""Hosts that differ are named with their ranks; axes that do not lie host by host are told with what that costs."""

from __future__ import annotations

import random
import socket
import time
from pathlib import Path

import pytest

from shardwise.errors import InputError
from shardwise.layout import Plan
from shardwise.layout.grid import AXES, Grid
from shardwise.ranks import interfaces
from shardwise.ranks.alike import axis_notices, check_alike, clock_notices, facts_here, in_host_order

BLOCK, CYCLIC = ["a", "a", "b", "b"], ["a", "b", "a", "b"]


def rows(hosts: list[str], **differing: list[str]) -> list[dict]:
    return [
        {"host": host, "alike": {"torch": "2.13", **{name: values[rank] for name, values in differing.items()}}}
        for rank, host in enumerate(hosts)
    ]


def test_what_differs_is_named_with_hosts_and_ranks() -> None:
    check_alike(rows(BLOCK, plan=["tp=2"] * 4))
    with pytest.raises(InputError, match=r"plan: tp=2 on a \(2 ranks from 0\), pp=2 on b \(2 ranks from 2\)") as told:
        check_alike(rows(BLOCK, plan=["tp=2", "tp=2", "pp=2", "pp=2"]))
    assert "torch" not in str(told.value)


def test_a_fact_that_a_host_lacks_is_a_difference() -> None:
    given = rows(["a", "b"])
    given[1]["alike"]["the code of x.py"] = "abc"
    with pytest.raises(InputError, match=r"the code of x.py: nothing on a \(rank 0\), abc on b \(rank 1\)"):
        check_alike(given)


def test_facts_are_the_same_twice_and_follow_the_code() -> None:
    assert facts_here({"plan": "x"}) == facts_here({"plan": "x"})
    assert facts_here()["host"] == socket.gethostname()
    assert {"python", "torch", "shardwise"} <= facts_here()["alike"].keys()


@pytest.mark.parametrize(
    ("plan", "hosts", "axes"),
    [
        ("tp=2,dp_shard=2", BLOCK, []),
        ("tp=2,dp_shard=2", CYCLIC, ["tp"]),
        ("tp=4", BLOCK, []),
        ("tp=4", CYCLIC, []),
        ("dp_shard=2,pp=2", CYCLIC, ["dp_shard"]),
        ("dp_replicate=2,dp_shard=2", ["a", "b", "b", "a"], ["dp_shard"]),
        ("dp_shard=4", ["a", "a", "a", "b"], []),  # hosts of several sizes are planned nowhere
        ("dp_shard=4", ["a"] * 4, []),
    ],
)
def test_axes_that_lie_otherwise_are_told(plan: str, hosts: list[str], axes: list[str]) -> None:
    assert [notice.partition(":")[0] for notice in axis_notices(Plan.parse(plan), hosts)] == axes


def test_the_cost_is_told_where_the_cluster_is_known() -> None:
    [notice] = axis_notices(Plan.parse("tp=2,dp_shard=2"), CYCLIC, {"tp": (450.0, 50.0)})
    assert "at 50 GB/s instead of 450 its messages take 9.0 times as long" in notice


@pytest.mark.parametrize(
    ("hosts", "numbers"),
    [
        (BLOCK, [0, 1, 2, 3]),
        (CYCLIC, [0, 2, 1, 3]),
        (["b", "a", "c", "a", "b", "c"], [0, 2, 4, 3, 1, 5]),
    ],
)
def test_ranks_are_numbered_host_by_host(hosts: list[str], numbers: list[int]) -> None:
    assert in_host_order(hosts) == numbers
    placed = [host for _, host in sorted(zip(numbers, hosts, strict=True))]
    assert placed == sorted(hosts, key=lambda host: (hosts.index(host),))
    assert not axis_notices(Plan(dp_shard=len(hosts)), placed)


def test_clocks_that_differ_are_told() -> None:
    given = rows(["a", "b"])
    assert clock_notices(given, [1000.0, 1000.2]) == []
    assert clock_notices(given, [1000.0, 1061.0]) == [
        "the clock of a is 61 s behind that of b: times in logs will not agree"
    ]
    assert clock_notices(rows(["a", "a"]), [1000.0, 1061.0]) == []


def test_the_interface_of_an_address_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interfaces.interface_of("127.0.0.1") == "lo"
    assert interfaces.interface_of("203.0.113.7") is None
    assert interfaces.route_to("127.0.0.1") == "127.0.0.1"
    monkeypatch.delenv(interfaces.CHOSEN, raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", no_names(socket.getaddrinfo))
    interfaces.talk_over_reachable("127.0.0.1")
    import os

    assert os.environ.pop(interfaces.CHOSEN) == "lo"


def no_names(asked):
    """As `getaddrinfo`, for a host whose own name nobody knows."""

    def answer(host, *args, **words):
        if host == socket.gethostname():
            raise socket.gaierror(-2, "Name or service not known")
        return asked(host, *args, **words)

    return answer


PLANS = (
    *("tp=2,dp_shard=2", "tp=2,dp_replicate=2", "tp=4", "tp=2,pp=2", "pp=2,dp_shard=2", "pp=4", "dp_shard=4"),
    *("dp_replicate=2,dp_shard=2", "tp=2,pp=2,dp_shard=2", "tp=4,dp_shard=2", "cp=2,dp_shard=2", "ep=2,dp_shard=4"),
)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dealt", ["block", "cyclic", "shuffled"])
@pytest.mark.parametrize("count", [2, 4])
def test_ranks_lie_as_planned_or_it_is_told(plan: str, dealt: str, count: int) -> None:
    """Ranks that can be numbered anew lie as planned; of those that cannot, each axis that lies otherwise is told."""
    parsed = Plan.parse(plan)
    world = parsed.world_size
    hosts = [f"host{rank * count // world}" for rank in range(world)]
    if dealt == "cyclic":
        hosts = [f"host{rank % count}" for rank in range(world)]
    elif dealt == "shuffled":
        random.Random(plan).shuffle(hosts)
    numbers = in_host_order(hosts)
    assert sorted(numbers) == list(range(world))
    placed = [host for _, host in sorted(zip(numbers, hosts, strict=True))]
    assert not axis_notices(parsed, placed)
    told = {notice.partition(":")[0] for notice in axis_notices(parsed, hosts)}
    assert told == {axis for axis in AXES if spread(parsed, axis, hosts) > spread(parsed, axis, placed)}


def spread(plan: Plan, axis: str, hosts: list[str]) -> int:
    """The most hosts on which the ranks of a group of this axis lie."""
    grid = Grid(plan)
    return max(len({hosts[other] for other in grid.group(rank, (axis,))}) for rank in range(len(hosts)))


@pytest.mark.parametrize(
    ("chosen", "route", "words"),
    [
        ("lo", "10.0.0.7", "where lo is the host itself"),
        ("ib7", "10.0.0.7", "which has lo, eth0"),
        ("eth0", "10.0.0.7", ""),
        ("eth0,lo", "10.0.0.7", "where lo is the host itself"),
        ("lo", "127.0.0.1", ""),  # all ranks are on this host
        ("lo", None, ""),
        ("", "10.0.0.7", ""),
    ],
)
def test_an_interface_that_reaches_no_other_host_is_told(
    chosen: str, route: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(interfaces.CHOSEN, chosen)
    monkeypatch.setattr(interfaces, "route_to", lambda host: route)
    own = [("lo", "127.0.0.1"), ("eth0", "10.0.0.7"), ("lo", "::1"), ("eth0", "fe80::1")]
    monkeypatch.setattr(interfaces, "addresses", lambda: own)
    told = interfaces.unreachable("first")
    assert words in told and bool(words) == bool(told)


def test_all_ranks_hear_of_an_interface_of_one() -> None:
    import torch.distributed as dist

    store = dist.HashStore()
    with pytest.raises(InputError, match="rank 1: x=lo"):
        interfaces.agree(store, 1, 2, "x=lo", time.monotonic() + 5)
    with pytest.raises(InputError, match="rank 1: x=lo"):
        interfaces.agree(store, 0, 2, "", time.monotonic() + 5)
    interfaces.agree(dist.HashStore(), 0, 1, "", time.monotonic() + 5)


def test_interfaces_have_addresses_of_both_kinds() -> None:
    assert ("lo", "127.0.0.1") in interfaces.addresses()
    table = Path("/proc/net/if_inet6")
    if table.exists() and f"{1:032x}" in table.read_text():  # this host has IPv6
        assert ("lo", "::1") in interfaces.addresses()
        assert interfaces.interface_of("::1") == interfaces.interface_of("0:0:0:0:0:0:0:1") == "lo"
    assert interfaces.interface_of("2001:db8::7") is None
