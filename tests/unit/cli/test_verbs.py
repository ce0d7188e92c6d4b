from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from moonpool.cli.detach import behind
from moonpool.cli.doctor.child import works
from moonpool.cli.up import _announce
from moonpool.cluster.configure import all_keys, load_config
from moonpool.core.config import Config, SecurityConfig

COMMAND = (sys.executable, "-m", "moonpool.cli.main")


def run(home: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MOONPOOL_")}
    return subprocess.run(
        (*COMMAND, *words), capture_output=True, text=True, timeout=60, check=False, env={**kept, "HOME": str(home), **env}
    )


def require_one_line(done: subprocess.CompletedProcess[str], *named: str) -> None:
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert done.stderr.startswith("moonpool: ")
    for text in named:
        assert text in done.stderr


def test_config_show_prints_a_file_that_can_be_given_back_with_origins(tmp_path: Path) -> None:
    done = run(tmp_path, "config", "show", "--set", "engine.poison=true", MOONPOOL_GATEWAY_PORT="8123")
    assert done.returncode == 0
    assert "port = 8123" in done.stdout
    assert "# environment MOONPOOL_GATEWAY_PORT" in done.stdout
    assert "# command line" in done.stdout
    shown = tomllib.loads(done.stdout)
    assert sorted(f"{s}.{k}" for s, values in shown.items() for k in values) == sorted(all_keys())
    file = tmp_path / "again.toml"
    file.write_text(done.stdout)
    again, _ = load_config(file, {}, {})
    assert (again.gateway.port, again.engine.poison) == (8123, True)


def test_tables_and_lists_that_were_chosen_are_shown_so_that_they_can_be_given_back(tmp_path: Path) -> None:
    chosen = ('scheduler.policy_settings={"age": 0.2}', 'store.quotas={"alice b": "1 GiB"}', 'store.codecs=["int8"]')
    done = run(tmp_path, "config", "show", *(word for text in chosen for word in ("--set", text)))
    file = tmp_path / "again.toml"
    file.write_text(done.stdout)
    again, _ = load_config(file, {}, {})
    assert again.scheduler.policy_settings == {"age": 0.2}
    assert (again.store.quotas, again.store.codecs) == ({"alice b": 1 << 30}, ("int8",))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("up", "--set", "gateway.prot=1"), "did you mean gateway.port?"),
        (("up", "--set", "gateway.port"), "has no '='"),
        (("up", "--role", "prefill"), "--role: 'prefill'"),
        (("up", "--launcher", "nomad"), "cluster.launcher: 'nomad'"),
        (("up", "--launcher", "process", "--port", "0", "--model", "no-such-model"), "model.path: 'no-such-model'"),
        (("config", "show", "--config", "missing.toml"), "cannot read missing.toml"),
        (("status",), "start it with `moonpool up`"),
        (("chat", "hello"), "start it with `moonpool up`"),
        (("explain", "x"), "start it with `moonpool up`"),
        (("status", "--set", "cluster.registry=127.0.0.1:1"), "127.0.0.1:1 does not answer"),
        (("run", "prefill"), "--registry: missing"),
        (("run", "cook", "--registry", "127.0.0.1:1"), "ROLE: 'cook'"),
        (("run", "prefill", "--id", "../x", "--registry", "127.0.0.1:1"), "--id: '../x'"),
        (("run", "registry", "--registry", "nowhere"), "is not host:port"),
        (("run", "registry", "--registry", "etcd://a:1"), "needs no registry of ours"),
        (("status", "--set", "cluster.registry=etcd://a"), "'a' is not host:port; write etcd://host:port"),
        (("run", "--spec", "missing.json"), "cannot read missing.json"),
        (("chat", "hello", "--url", "http://127.0.0.1:1"), "does not answer"),
        (("replay", "--url", "http://127.0.0.1:1"), "TRACE: give a file, or --generate"),
        (("replay", "t.jsonl", "--generate", "--url", "http://127.0.0.1:1"), "TRACE: give a file, or --generate"),
        (("keys", "add", "a", "--days", "nan", "--file", "keys.toml"), "--days: nan is out of range"),
        (("keys", "add", "a", "--days", "0", "--file", "keys.toml"), "--days: 0 is out of range"),
        (("keys", "tenant", "a", "--pool-bytes", "much", "--file", "keys.toml"), "--pool-bytes: 'much' is no size"),
        (("chaos", "--picture", "missing/run.png"), "--picture: missing is no folder"),
        (("chaos", "--log", "missing/run.jsonl"), "--log: missing is no folder"),
        (("chaos", "--kinds", ","), "--kinds: ',' names none"),
        (("bench", "security", "--path", "missing", "--cluster-rounds", "0"), "--path: missing is no folder"),
        (("replay", "--generate", "--speed", "0", "--url", "http://127.0.0.1:1"), "speed: 0.0"),
    ],
)
def test_a_mistake_is_one_line_naming_it_and_exit_code_2(tmp_path: Path, words: tuple[str, ...], named: str) -> None:
    done = run(tmp_path, *words)
    last = done.stderr.strip().splitlines()[-1:]
    require_one_line(subprocess.CompletedProcess(done.args, done.returncode, done.stdout, "".join(last)), named)
    assert "Traceback" not in done.stderr


def test_an_unknown_variable_of_ours_is_refused(tmp_path: Path) -> None:
    require_one_line(run(tmp_path, "config", "show", MOONPOOL_GATEWAY_PROT="1"), "MOONPOOL_GATEWAY_PORT")


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    done = run(tmp_path, "--debug", "status")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_a_busy_port_is_said_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        require_one_line(run(tmp_path, "up", "--port", str(port)), f"gateway.port: cannot listen on 127.0.0.1:{port}")


def test_only_who_can_press_ctrl_c_is_told_to(capsys: pytest.CaptureFixture[str]) -> None:
    for words, told in ((["moonpool", "up"], True), (behind(["moonpool", "up", "--detach"]), False)):
        assert "--detach" not in words
        _announce(Config(), "http://here", [], "--detached" in words, ())
        said = capsys.readouterr().err
        assert ("http://here" in said, "Ctrl-C" in said) == (True, told)
        assert "console: http://here/console" in said


def test_the_request_to_try_carries_what_the_gateway_asks_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ca.pem").touch()
    cert = str(tmp_path / "cert.pem")
    _announce(Config(security=SecurityConfig(https_cert=cert, api_keys_file="keys.toml")), "https://here", [], True, ())
    said = capsys.readouterr().err
    assert f"--cacert {tmp_path}/ca.pem https://here/v1" in said
    assert '-H "authorization: Bearer $MOONPOOL_API_KEY"' in said


def test_a_tenant_without_any_key_is_told(tmp_path: Path) -> None:
    file = str(tmp_path / "keys.toml")
    assert "no key in" in run(tmp_path, "keys", "tenant", "acme", "--pool-bytes", "1GiB", "--file", file).stderr
    assert run(tmp_path, "keys", "add", "alice", "--tenant", "acme", "--file", file).returncode == 0
    assert run(tmp_path, "keys", "tenant", "acme", "--weight", "2", "--file", file).stderr == ""
    assert f"pool_bytes={1 << 30}" in run(tmp_path, "keys", "list", "--file", file).stdout


def test_down_without_a_cluster_says_so(tmp_path: Path) -> None:
    done = run(tmp_path, "down")
    assert done.returncode == 0
    assert "nothing was running" in done.stderr


def test_version_is_the_packages(tmp_path: Path) -> None:
    from moonpool import __version__

    assert run(tmp_path, "version").stdout.strip() == __version__


@pytest.mark.processes
def test_a_registry_of_its_own_runs_until_told_to_stop(tmp_path: Path) -> None:
    child = subprocess.Popen(
        (*COMMAND, "run", "registry", "--registry", "127.0.0.1:0"),
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    assert child.stderr is not None
    with child.stderr as err:
        address = err.readline().strip().rpartition(" ")[2]
        shown = run(tmp_path, "status", "--json", "--set", f"cluster.registry={address}")
        assert json.loads(shown.stdout) == {"registry": address, "url": "", "leader": "", "leaders": {}, "members": []}
        child.send_signal(signal.SIGTERM)
        assert child.wait(10) == 128 + signal.SIGTERM


class Scripted(BaseHTTPRequestHandler):
    """A gateway that streams what its server was given."""

    events: tuple[object, ...] = ()

    def do_GET(self) -> None:
        self._send(200, "application/json", json.dumps({"data": [{"id": "m"}]}).encode())

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if asked["messages"][0]["content"] == "refuse":
            self._send(429, "application/json", json.dumps({"error": {"message": "too busy"}}).encode())
            return
        if asked["messages"][0]["content"] == "which model":
            self.events = (delta(asked["model"]),)
        body = b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in self.events)
        self._send(200, "text/event-stream", body + b"data: [DONE]\n\n")

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def gateway(*events: object) -> Iterator[str]:
    handler = type("Told", (Scripted,), {"events": events})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def delta(text: str) -> dict[str, object]:
    return {"choices": [{"delta": {"content": text}}]}


def test_chat_prints_the_answer_as_it_streams(tmp_path: Path) -> None:
    with gateway({"choices": [{"delta": {"role": "assistant"}}]}, delta("Par"), delta("is."), {"choices": []}) as url:
        done = run(tmp_path, "chat", "hello", "--url", url)
    assert (done.returncode, done.stdout) == (0, "Paris.\n")


def test_chat_asks_the_model_that_is_named_else_the_first_one_served(tmp_path: Path) -> None:
    with gateway() as url:
        assert run(tmp_path, "chat", "which model", "--url", url, "--model", "polite").stdout == "polite\n"
        assert run(tmp_path, "chat", "which model", "--url", url).stdout == "m\n"


def test_chat_reports_a_refusal_and_an_error_in_the_stream_in_the_servers_words(tmp_path: Path) -> None:
    with gateway(delta("Pa"), {"error": {"message": "decode-0 died"}}) as url:
        refused = run(tmp_path, "chat", "refuse", "--url", url)
        broken = run(tmp_path, "chat", "hello", "--url", url)
    require_one_line(refused, "HTTP 429: too busy")
    assert (broken.returncode, broken.stdout) == (2, "Pa\n")
    assert "decode-0 died" in broken.stderr


def test_the_doctor_survives_a_library_that_crashes() -> None:
    assert works("fine", "pass", "fix").grade == "ok"
    crash = works("crash", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "fix it")
    assert (crash.grade, crash.what, crash.fix) == ("fail", "crash: killed by signal 11", "fix it")
    missing = works("missing", "import no_such_library", "install it")
    assert missing.what == "missing: ModuleNotFoundError: No module named 'no_such_library'"


def test_trace_generate_writes_the_rows_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "t.jsonl"
    done = run(tmp_path, "trace", "generate", str(out), "--requests", "7", "--set", "turns=2")
    assert (done.returncode, done.stdout.strip()) == (0, str(out))
    assert len(out.read_text().splitlines()) == 7
    require_one_line(run(tmp_path, "trace", "generate", str(out), "--set", "turn=2"), "--set: 'turn'")
