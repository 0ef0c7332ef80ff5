"""Sinks that tell the system which runs this job how far the run is: a TrainJob's status, Ray Train's metrics.

TrainJob   its controller names a server, a certificate and a token in the environment; progress, time left and metrics
           are posted there at most every few seconds, by a thread of its own
Ray        the worker that started this rank reads a line for each record from a pipe (`shardwise.ray`)

Each sink is used if its variables are set in the environment. A failed post stops no run and is reported once.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shardwise.errors import first_line
from shardwise.observe.sinks import Sink

TRAIN_JOB = tuple(f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
RAY_PIPE = "SHARDWISE_RAY_PIPE"  # number of the file that this rank's worker reads
EVERY_S = 5.0  # seconds between two posts, as the controller asks
ANSWER_S = 10.0  # seconds to wait for an answer
RECENT = 20  # last records, whose times give the seconds of a step


def engine_sinks(environ: Mapping[str, str], checkpoints: Path, steps: int) -> list[Sink]:
    """Returns the sinks whose variables are set in `environ`, [] for none.

    checkpoints  the folder of the run's checkpoints
    steps        of the whole run
    """
    sinks: list[Sink] = []
    if all(environ.get(name) for name in TRAIN_JOB):
        sinks.append(TrainJobStatus(*(environ[name] for name in TRAIN_JOB), steps=steps))
    if environ.get(RAY_PIPE):
        sinks.append(RayWorker(int(environ[RAY_PIPE]), checkpoints))
    return sinks


class RayWorker:
    """Sink that writes lines of JSON to this rank's Ray worker: {"checkpoints": folder}, then each record."""

    def __init__(self, pipe: int, checkpoints: Path) -> None:
        """`pipe` is the file descriptor that the worker reads."""
        self._file = os.fdopen(pipe, "w", encoding="utf-8")
        self._say({"checkpoints": str(checkpoints)})

    def write(self, step: int, numbers: dict[str, float]) -> None:
        self._say({"step": step, **numbers})

    def _say(self, record: dict[str, Any]) -> None:
        """Writes one line of JSON."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TrainJobStatus:
    """Sink that posts progress in percent, seconds left and the last metrics to a TrainJob's controller."""

    def __init__(self, url: str, certificate: str, token: str, *, steps: int, every_s: float = EVERY_S) -> None:
        """Starts the thread that posts.

        certificate  path of the server's CA certificate
        token        path of a file with the bearer token
        steps        of the whole run
        every_s      least seconds between two posts
        """
        self._url, self._certificate, self._token = url, certificate, token
        self._steps, self._every_s = steps, every_s
        self._times: list[tuple[int, float]] = []
        self._numbers: dict[str, float] = {}
        self._news, self._closed, self._told = threading.Event(), threading.Event(), False
        self._thread = threading.Thread(target=self._post_news, daemon=True, name="trainer-status")
        self._thread.start()

    def write(self, step: int, numbers: dict[str, float]) -> None:
        self._times = [*self._times, (step, time.monotonic())][-RECENT:]
        self._numbers = {**self._numbers, **numbers}
        self._news.set()

    def close(self) -> None:
        self._closed.set()
        self._news.set()
        self._thread.join(2 * ANSWER_S)

    def _post_news(self) -> None:
        """Posts new numbers, at most once in `_every_s` seconds, until it is closed; runs in the thread."""
        while not self._closed.is_set():
            self._news.wait()
            self._news.clear()
            if self._times:
                self._post()
            self._closed.wait(self._every_s)
        if self._news.is_set() and self._times:  # written during the last wait
            self._post()

    def status(self) -> dict[str, Any]:
        """Returns the body of a post: {"trainerStatus": percentage, metrics, time, and seconds left if known}."""
        done, at = self._times[-1]
        status: dict[str, Any] = {
            "progressPercentage": min(100, 100 * done // self._steps),
            "metrics": [{"name": name, "value": f"{value:.6g}"} for name, value in self._numbers.items()],
            "lastUpdatedTime": datetime.now(UTC).isoformat(),
        }
        before, then = self._times[0]
        if done > before or done >= self._steps:
            left = (self._steps - done) * (at - then) / max(1, done - before)
            status["estimatedRemainingSeconds"] = round(left)
        return {"trainerStatus": status}

    def _post(self) -> None:
        """Posts the status to the TrainJob's controller; a failure is reported once on stderr, and the run goes on."""
        try:
            token = Path(self._token).read_text(encoding="utf-8").strip()  # it is renewed while the run goes on
            request = urllib.request.Request(
                self._url,
                json.dumps(self.status()).encode(),
                {"Content-Type": "application/json", "Authorization": f"Bearer {token}"},
                method="POST",
            )
            context = ssl.create_default_context(cafile=self._certificate)
            urllib.request.urlopen(request, timeout=ANSWER_S, context=context).close()
        except (OSError, ValueError) as error:  # ValueError: a URL that is none
            if not self._told:
                sys.stderr.write(
                    f"\nthe TrainJob's status is not told ({self._url}): {first_line(error)}; the run goes on\n"
                )
            self._told = True
