"""What an engine is told of a run: a TrainJob's status over HTTPS, Ray's worker through a pipe."""

from __future__ import annotations

import json
import os
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from shardwise.observe.engine_sinks import RAY_PIPE, TRAIN_JOB, TrainJobStatus, engine_sinks


class Controller:
    """The server of a TrainJob's controller: what was posted, and what it asks of who posts."""

    def __init__(self, folder: Path) -> None:
        self.posted: list[tuple[str, dict]] = []
        self.certificate, self.token = folder / "ca.crt", folder / "token"
        key, said = folder / "key", self.posted
        self.token.write_text("first\n")
        subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-keyout", str(key),
                        "-out", str(self.certificate), "-subj", "/CN=localhost", "-addext",
                        "subjectAltName=DNS:localhost"], check=True, capture_output=True, timeout=60)  # fmt: skip

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                said.append((self.headers["Authorization"], body["trainerStatus"]))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *words: object) -> None: ...

        self.server = HTTPServer(("localhost", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, key)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.url = f"https://localhost:{self.server.server_port}/status"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl, to make a certificate")
    made = Controller(tmp_path)
    yield made
    made.server.shutdown()
    made.server.server_close()


def came(posted: list, count: int) -> bool:
    until = time.monotonic() + 60
    while len(posted) < count and time.monotonic() < until:
        time.sleep(0.01)
    return len(posted) >= count


def test_a_trainjob_is_told_progress_time_left_and_metrics(controller: Controller, tmp_path: Path) -> None:
    environ = dict(zip(TRAIN_JOB, (controller.url, str(controller.certificate), str(controller.token)), strict=True))
    assert engine_sinks({**environ, TRAIN_JOB[0]: ""}, tmp_path, 8) == []
    sink = TrainJobStatus(*environ.values(), steps=8, every_s=0.01)
    sink.write(2, {"loss": 2.5})
    assert came(controller.posted, 1)
    controller.token.write_text("second\n")  # it is renewed
    time.sleep(0.05)
    sink.write(4, {"loss": 1.25, "lr": 1e-3})
    assert came(controller.posted, 2)
    sink.write(8, {"eval_loss": 1.0})
    sink.close()
    (bearer, first), (renewed, second), *_, (_, last) = controller.posted
    assert (bearer, renewed) == ("Bearer first", "Bearer second")
    assert first["progressPercentage"] == 25 and "estimatedRemainingSeconds" not in first
    assert first["metrics"] == [{"name": "loss", "value": "2.5"}]
    assert second["progressPercentage"] == 50 and second["estimatedRemainingSeconds"] >= 0
    assert {"name": "lr", "value": "0.001"} in second["metrics"]
    assert last["progressPercentage"] == 100 and last["estimatedRemainingSeconds"] == 0
    assert {one["name"] for one in last["metrics"]} == {"loss", "lr", "eval_loss"}


def test_time_left_follows_from_the_last_steps() -> None:
    sink = object.__new__(TrainJobStatus)
    sink._steps, sink._numbers, sink._times = 100, {}, [(10, 50.0), (20, 70.0)]
    assert sink.status()["trainerStatus"]["estimatedRemainingSeconds"] == 160


def test_a_controller_that_takes_nothing_is_said_once(controller: Controller, capfd, tmp_path: Path) -> None:
    sink = TrainJobStatus(controller.url, str(controller.certificate), str(tmp_path / "none"), steps=4, every_s=0.01)
    for step in range(4):
        sink.write(step, {"loss": 1.0})
        time.sleep(0.05)
    sink.close()
    assert not controller.posted
    assert capfd.readouterr().err.count("the TrainJob's status is not told") == 1


def test_rays_worker_reads_where_checkpoints_lie_and_each_record(tmp_path: Path) -> None:
    read, write = os.pipe()
    [sink] = engine_sinks({RAY_PIPE: str(write)}, tmp_path / "checkpoints", 5)
    sink.write(1, {"loss": 2.0})
    sink.close()
    with os.fdopen(read) as lines:
        told = [json.loads(line) for line in lines]
    assert told == [{"checkpoints": str(tmp_path / "checkpoints")}, {"step": 1, "loss": 2.0}]
