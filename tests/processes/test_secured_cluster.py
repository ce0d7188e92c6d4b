"""A local cluster with everything switched on: certificates, HTTPS, API keys, encrypted KV. It serves; nobody else gets in."""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
from support.certificates import Certificates
from support.cluster import LocalCluster, running
from support.secrets import found_in, private_keys, told_of

from moonpool.cluster.identity.https import trusting
from moonpool.core.principal import Party

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

NODES = [{"name": "a", "prefill": 1}, {"name": "b", "decode": 1, "conductor": 1, "gateway": 1}]
MEMBERS = ["conductor-0", "decode-0", "gateway-0", "prefill-0", "store-a", "store-b"]
MINE = os.environ | {"GRPC_VERBOSITY": "NONE"}


def moonpool(*words: str, env: dict[str, str] = MINE) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "moonpool.cli.main", *words)
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=120)


class Secured(LocalCluster):
    """``api_key`` is a user's. Clients of the tests trust the gateway's own certificate."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.https = Certificates(folder / "https-ca").https("127.0.0.1")
        self.keys_file = folder / "api-keys.toml"
        self.admin_key = moonpool("keys", "add", "boss", "--role", "admin", "--file", str(self.keys_file)).stdout.strip()
        self.api_key = moonpool("keys", "add", "tester", "--tenant", "red", "--file", str(self.keys_file)).stdout.strip()
        values = {
            "security__tls": "auto",
            "security__https_cert": self.https / "cert.pem",
            "security__https_key": self.https / "key.pem",
            "security__api_keys_file": self.keys_file,
            "security__kv_encryption": "aes-gcm",
            "store__pool_bytes": 32 << 20,
            "engine__page_bytes": 32 << 20,
        }
        super().__init__(folder, model, NODES, **values)

    def ask(self, verb: str, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """A verb as an operator here calls it: nothing said about security."""
        where = ("--set", f"cluster.name={self.name}", "--set", f"cluster.state_dir={self.folder / 'state'}")
        return moonpool(verb, *words, *where, env=MINE | env)

    def secrets(self) -> dict[str, bytes]:
        keys = [*private_keys(self.folder), self.folder / "hash.key", self.folder / "kv.key"]
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in keys} | {"the API key": self.api_key.encode()}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Secured]:
    with running(Secured(tmp_path_factory.mktemp("secured"), tiny_model)) as cluster:
        yield cluster


def test_a_client_that_trusts_the_certificate_and_has_a_key_is_served(cluster: Secured) -> None:
    assert cluster.url.startswith("https://127.0.0.1:")
    body = {"model": "smollm2", "prompt": [5 + i % 90 for i in range(200)], "max_tokens": 4, "ignore_eos": True}
    with httpx.Client(base_url=cluster.url, verify=trusting(str(cluster.https / "cert.pem")), timeout=60) as client:
        answer = client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {cluster.api_key}"})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert client.post("/v1/completions", json=body).status_code == 401


def test_the_console_looks_into_other_processes_by_the_gateways_certificate(cluster: Secured) -> None:
    body = {"model": "smollm2", "prompt": [7 + i % 90 for i in range(100)], "max_tokens": 4, "ignore_eos": True}
    admin = {"authorization": f"Bearer {cluster.admin_key}"}
    with httpx.Client(base_url=cluster.url, verify=trusting(str(cluster.https / "cert.pem")), timeout=60) as client:
        answer = client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {cluster.api_key}"})
        told = client.get(f"/console/api/request/{answer.headers['x-moonpool-request-id']}", headers=admin).json()
        seen = client.get("/console/api/cluster", headers=admin).json()
        assert client.get("/console/api/cluster", headers={"authorization": f"Bearer {cluster.api_key}"}).status_code == 403
    assert {row["member"] for row in told["waterfall"]["rows"]} >= {"gateway-0", "decode-0"}
    assert told["decision"]["decisions"][0]["placed"]["prefill"]["id"] == "prefill-0"
    assert [(one["id"], one["note"]) for one in seen["members"]] == [(member, "") for member in MEMBERS]


def test_plain_http_and_old_tls_are_refused_at_the_gateway(cluster: Secured) -> None:
    where = cluster.url.removeprefix("https://")
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{where}/v1/models", timeout=10)
    with pytest.raises(httpx.ConnectError, match=r"self-signed|unable to get local issuer"):
        httpx.get(f"https://{where}/v1/models", timeout=10)
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLS"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    host, _, port = where.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as line, pytest.raises((ssl.SSLError, ConnectionError)):
        old.wrap_socket(line)


def test_the_operators_verbs_find_their_certificate_in_the_state_folder(cluster: Secured) -> None:
    shown = cluster.ask("status", "--json")
    assert shown.returncode == 0, shown.stderr
    members = {one["id"]: one for one in json.loads(shown.stdout)["members"]}
    assert sorted(members) == MEMBERS
    for name, one in members.items():
        assert not one["trouble"], f"{name}: {one['trouble']}"
        assert one["numbers"]["certificate_left_s"] > 3_600
    chat = cluster.ask("chat", "hello", "--max-tokens", "2", MOONPOOL_API_KEY=cluster.api_key)
    assert "no chat template" in chat.stderr, "the gateway itself says what this model lacks"


def test_whoever_has_no_certificate_of_this_cluster_learns_nothing_from_any_port(cluster: Secured, tmp_path: Path) -> None:
    assert cluster.state is not None
    registry = cluster.state.registry
    plain = moonpool("status", "--set", f"cluster.registry={registry}")
    assert plain.returncode == 2 and "wants a certificate" in plain.stderr
    stranger = Certificates(tmp_path, cluster.name).of(Party.OPERATOR)
    settings = ("security.tls=files", f"security.tls_dir={stranger}", f"cluster.name={cluster.name}")
    strange = moonpool("status", *(part for one in (f"cluster.registry={registry}", *settings) for part in ("--set", one)))
    assert strange.returncode == 2 and "not of this side's CA" in strange.stderr
    addresses = [one["address"] for one in json.loads(cluster.ask("status", "--json").stdout)["members"]]
    for address in [registry, *addresses]:
        with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=10)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]


def test_no_secret_shows_in_logs_output_command_lines_or_environments(cluster: Secured) -> None:
    assert cluster._process is not None
    secrets = cluster.secrets()
    assert len(secrets) >= 12, "a key of every process, of the authority, of HTTPS, of hashes and of KV"
    files = [path for path in (cluster.folder / "state").rglob("*") if path.is_file() and "tls" not in path.parts]
    places = [(str(path), path.read_bytes()) for path in [*files, cluster.folder / "up.log"]]
    for words in (("status",), ("status", "--json"), ("config", "show"), ("doctor",)):
        asked = cluster.ask(*words) if words[0] == "status" else moonpool(*words, *cluster._settings)
        places.append((" ".join(words), (asked.stdout + asked.stderr).encode()))
    places += list(told_of(psutil.Process(cluster._process.pid)))
    assert len(places) > 20
    assert found_in(places, secrets) == []


def test_sockets_folders_and_regions_are_for_this_user_only(cluster: Secured) -> None:
    state = cluster.folder / "state"
    sockets, regions = list(state.rglob("*.sock")), list(Path("/dev/shm").glob(f"moonpool+{cluster.name}+*"))
    assert len(sockets) == 4 and len(regions) >= 2
    private = [state, *sockets, *regions, *private_keys(cluster.folder)]
    assert {str(path): oct(path.stat().st_mode) for path in private if path.stat().st_mode & 0o077} == {}
