"""What operators look with: Debian's Prometheus against a running cluster, and a collector that keeps the spans it is sent."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

PATIENCE_S = 20.0


def tool(name: str) -> str | None:
    """``prometheus`` or ``promtool``: of the system, or taken out of Debian's package by scripts/setup."""
    return shutil.which(name) or shutil.which(name, path=Path(sys.prefix) / "bin")


@dataclass
class Prometheus:
    url: str

    def get(self, path: str, **params: str) -> Any:
        """The ``data`` of an answer; what Prometheus says of an expression that it cannot evaluate is an AssertionError."""
        told = httpx.get(f"{self.url}/api/v1/{path}", params=params, timeout=10.0, trust_env=False).json()
        assert told["status"] == "success", (params, told.get("error"))
        return told["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return found

    def until(self, true: Callable[[], Any], what: str | Callable[[], str]) -> Any:
        until = time.monotonic() + PATIENCE_S
        while not (value := true()):
            assert time.monotonic() < until, what if isinstance(what, str) else what()
            time.sleep(0.1)
        return value


@contextmanager
def prometheus(folder: Path, targets: Path, rules: Path) -> Iterator[Prometheus]:
    """Scrapes ``targets`` (file_sd) every second and evaluates ``rules`` as often."""
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "moonpool", "file_sd_configs": [{"files": [str(targets)]}]}],
    }
    (folder / "prometheus.json").write_text(json.dumps(config))  # JSON is YAML
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = tool("prometheus")
    assert program is not None
    command = [program, f"--config.file={folder / 'prometheus.json'}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    running = Prometheus(f"http://127.0.0.1:{port}")
    try:
        running.until(lambda: _ready(running.url), f"Prometheus: {(folder / 'prometheus.log').read_text()[-2000:]}")
        yield running
    finally:
        process.terminate()
        process.wait(20)


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready", timeout=2.0, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


@dataclass(frozen=True)
class SpanSeen:
    trace: str
    id: str
    parent: str
    name: str
    member: str
    begin_ns: int
    end_ns: int
    facts: dict[str, Any] = field(default_factory=dict)
    failed: str = ""


class Collector:
    """An OpenTelemetry collector (OTLP over HTTP) that keeps what it gets."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[SpanSeen] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.take(self.path, self.rfile.read(int(self.headers["content-length"])), self.headers)
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="collector")
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def take(self, path: str, body: bytes, headers: Any) -> None:
        import gzip

        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        assert path == "/v1/traces"
        raw = gzip.decompress(body) if headers.get("content-encoding") == "gzip" else body
        with self._lock:
            for resource in ExportTraceServiceRequest.FromString(raw).resource_spans:
                member = _facts(resource.resource.attributes).get("service.instance.id", "")
                for scope in resource.scope_spans:
                    self._spans += [_seen(span, member) for span in scope.spans]

    def spans(self, **facts: object) -> list[SpanSeen]:
        """Those with these facts, in the order of their begin."""
        wanted = {f"moonpool.{name}": value for name, value in facts.items()}
        with self._lock:
            found = [one for one in self._spans if wanted.items() <= one.facts.items()]
        return sorted(found, key=lambda span: span.begin_ns)


def _seen(span: Any, member: str) -> SpanSeen:
    bad = span.status.message if span.status.code == 2 else ""
    begin, end = span.start_time_unix_nano, span.end_time_unix_nano
    ids = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
    return SpanSeen(*ids, span.name, member, begin, end, _facts(span.attributes), bad)


def _facts(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
