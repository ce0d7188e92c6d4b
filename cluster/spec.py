"""What one process is to be: everything it needs, as JSON, so that any launcher can start it."""

from __future__ import annotations

import ipaddress
import json
from dataclasses import dataclass
from pathlib import Path

from moonpool.cluster.sharing import torch_threads
from moonpool.core.config import Config
from moonpool.core.errors import ConfigError
from moonpool.core.ids import MemberId, NodeId, Role, checked_name
from moonpool.core.parsing import read_json

SECURITY_FILES = ("tls_dir", "https_cert", "https_key", "api_keys_file")
GATEWAY_FILES = ("usage_log", "warm_file")
ETCD_FILES = ("etcd_ca", "etcd_cert", "etcd_key", "etcd_password_file")


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """``config`` carries absolute paths; ``model_dir`` is a local directory, fetched before any process starts."""

    member: MemberId
    role: Role
    node: NodeId
    config: Config
    registry: str  # as ``etcd.address.registry_of`` says it
    model_dir: Path

    @property
    def state_dir(self) -> Path:
        return Path(self.config.cluster.state_dir)

    @property
    def threads(self) -> int:
        """Of PyTorch's kernels."""
        return torch_threads(self.config, self.role)

    def environment(self) -> dict[str, str]:
        """Variables that UCX and OpenMP read once, at their first import. What the user has set already stays."""
        config = self.config.transfer
        wanted = {
            "UCX_TLS": config.ucx_tls,
            "UCX_LOG_LEVEL": "error",
            "OMP_NUM_THREADS": str(self.threads),
            "TQDM_DISABLE": "1",
            "GRPC_VERBOSITY": "NONE",  # it would write a line for every connection that speaks no TLS
        }
        if not Path("/sys/class/infiniband").exists():
            wanted["UCX_MODULES"] = "^ib"  # without a device its verbs module crashes every process at exit
        devices = config.ucx_net_devices or ("lo" if _is_loopback(self.config.cluster.host) else "")
        if devices:
            wanted["UCX_NET_DEVICES"] = devices
        return wanted

    def to_json(self) -> str:
        return json.dumps(
            {
                "member": self.member,
                "role": self.role.value,
                "node": self.node,
                "config": self.config.model_dump(mode="json"),
                "registry": self.registry,
                "model_dir": str(self.model_dir),
            }
        )

    @classmethod
    def from_json(cls, text: str) -> RoleSpec:
        """ConfigError where ``text`` is not what ``to_json`` writes."""
        try:
            raw = read_json(text)
            return cls(
                MemberId(checked_name(raw["member"], "member")),
                Role(raw["role"]),
                NodeId(checked_name(raw["node"], "node")),
                Config.model_validate(raw["config"]),
                str(raw["registry"]),
                Path(raw["model_dir"]),
            )
        except (ValueError, KeyError, TypeError) as e:
            raise ConfigError(f"spec: not a role specification: {e}", param="spec") from e


def with_absolute_paths(config: Config, home: Path) -> Config:
    """``config`` with ``state_dir`` and the key files spelled out, so that every process agrees whatever its home is."""
    paths = {"state_dir": str(config.state_dir(home).absolute()), "key_file": str(config.key_file(home).absolute())}
    named = {name: getattr(config.security, name) for name in SECURITY_FILES + ETCD_FILES}
    files = {name: str(Path(path).expanduser().absolute()) for name, path in named.items() if path}
    security = config.security.model_copy(update={**files, "kv_key_file": str(config.kv_key_file(home).absolute())})
    written = {name: path for name in GATEWAY_FILES if (path := getattr(config.gateway, name))}
    gateway = config.gateway.model_copy(
        update={name: str(Path(path).expanduser().absolute()) for name, path in written.items()}
    )
    cluster = config.cluster.model_copy(update=paths)
    return config.model_copy(update={"cluster": cluster, "security": security, "gateway": gateway})


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
