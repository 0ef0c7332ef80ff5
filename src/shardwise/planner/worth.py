"""`jobs`: hours and cost of a whole job (`plan --price`) on all devices, on fewer, and on one.

    job seconds on n devices = steps x step on n + start on n        cost = price x n x hours

A job is given as a number of tokens (steps = tokens / tokens of a step) or as its time on all devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwise.cluster import Cluster
from shardwise.costs.units import duration, seconds_text, tokens
from shardwise.errors import InputError
from shardwise.planner.candidates import Constraints
from shardwise.planner.proposal_text import Proposal, Search
from shardwise.planner.propose import search
from shardwise.planner.subject import Subject, first_devices

# Seconds from the command to the first step (assumed): to import, build and compile; to connect several processes; for
# each device
ALONE_S, MEET_S, EACH_S = 30.0, 30.0, 0.01
FEWER = (2, 4, 8)  # the devices divided by these are compared, and one device
PAYS = 1.5  # speed-up from which more devices are called worth it


@dataclass(frozen=True)
class AskedJob:
    """A job's length in tokens, or in seconds on all devices (both None: no job), and the price of a device-hour."""

    tokens: float | None = None
    seconds: float | None = None
    price: float = 0.0

    @classmethod
    def of(cls, job: str | None, count: str | None, price: float) -> AskedJob:
        """Returns the job of the options --job (such as `20m`), --tokens (`300B`) and --price; None: not given.

        Raises `InputError` if both lengths are given, or a price alone.
        """
        if job is not None and count is not None:
            raise InputError("--job and --tokens both say how long the job is: give one of the two")
        if price and job is None and count is None:
            raise InputError("--price is for a job: give it as --tokens 300B or --job 20m")
        return cls(
            None if count is None else tokens(count, "--tokens"), None if job is None else duration(job, "--job"), price
        )  # fmt: skip


@dataclass(frozen=True)
class JobCost:
    """The cost of a job of `steps` steps on `devices` devices under its best plan; `price` of a device-hour, or 0."""

    best: Proposal
    devices: int
    steps: float
    price: float = 0.0

    @property
    def start_s(self) -> float:
        return ALONE_S + (MEET_S + EACH_S * self.devices if self.devices > 1 else 0.0)

    @property
    def seconds(self) -> float:
        return self.start_s + self.steps * self.best.forecast.step_s

    @property
    def device_hours(self) -> float:
        return self.devices * self.seconds / 3600

    def as_dict(self) -> dict[str, object]:
        """Returns plan, devices, seconds, start_s, device_hours and cost as a dict for JSON."""
        return {
            "devices": self.devices, "plan": str(self.best.plan), "seconds": self.seconds, "start_s": self.start_s,
            "device_hours": self.device_hours, "cost": self.price * self.device_hours,
        }  # fmt: skip


def jobs(
    subject: Subject, cluster: Cluster, result: Search, constraints: Constraints, precision: str,
    asked: AskedJob,
) -> list[JobCost]:  # fmt: skip
    """Returns the cost of the job on all devices, then on fewer ones if it fits there; [] if no job was given.

    result  the search on all devices

    Raises `InputError` for a job in tokens if the task's samples are not tokens.
    """
    forecast, price = result.best.forecast, asked.price
    if asked.tokens is not None:
        if forecast.tokens is None:
            raise InputError("--tokens: samples of this task are not known to be of tokens; give its time as --job 20m")
        steps = asked.tokens / forecast.tokens
    elif asked.seconds is not None:
        steps = asked.seconds / forecast.step_s
    else:
        return []
    every = [JobCost(result.best, cluster.world_size, steps, price)]
    # a comparison with offloaded state would not be of the same kind of plan
    constraints = replace(constraints, offload=False)
    for count in _fewer(cluster.world_size):
        try:
            fewer = search(subject, first_devices(cluster, count), constraints, precision=precision)
        except InputError:  # it does not fit, or the batch does not divide
            continue
        every.append(JobCost(fewer.best, count, steps, price))
    return every


def _fewer(world: int) -> Iterator[int]:
    yield from dict.fromkeys([*(world // share for share in FEWER if world % share == 0 and world > share), 1])


def job_lines(every: list[JobCost]) -> list[str]:
    """Returns lines for people: one for each number of devices, and whether more devices are worth it."""
    if not every:
        return []
    lines = [f"the job, {every[0].steps:,.0f} steps and its start (assumed: {every[0].start_s:.0f} s):"]
    for job in every:
        cost = f", {job.price * job.device_hours:,.0f} at {job.price:g} for a device and hour" if job.price else ""
        lines.append(
            f"  {job.devices:6} devices  {_long(job.seconds):>9}  {job.device_hours:,.1f} device-hours{cost}"
            f"  {job.best.plan}"
        )
    most, least = every[0], every[-1]
    if most.devices == least.devices:
        return lines
    faster, dearer = least.seconds / most.seconds, most.device_hours / least.device_hours
    lines.append(
        f"  {most.devices} devices are {faster:.1f} times as fast as {least.devices}, "
        f"and cost {dearer:.2f} times as much"
    )
    if faster < PAYS:
        share = most.start_s / most.seconds
        lines.append(f"  not worth it: start-up is {share:.0%} of the job on {most.devices} devices")
    return lines


def _long(seconds: float) -> str:
    """Returns a long time as text, such as "3.2 days", "5.1 hours", "12.0 min" or "40 s"."""
    for size, name in ((86400, "days"), (3600, "hours"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {name}"
    return seconds_text(seconds)
