"""The cluster's keys for KV bytes: which one seals, which ones open, and how they are told apart."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moonpool.core.config import Config
from moonpool.core.errors import ConfigError
from moonpool.core.key_files import key_id, load_key, require_private

PARAM = "security.kv_key_file"
PREVIOUS = ".previous"  # a key file of the same name with this behind it: opens what was written under the key before
ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class KvKey:
    """32 secret bytes and their public name. Never shown: ``repr`` has the name alone."""

    secret: bytes
    id: str

    @classmethod
    def of(cls, secret: bytes) -> KvKey:
        return cls(secret, key_id(secret, "kv key"))

    @property
    def id_bytes(self) -> bytes:
        return bytes.fromhex(self.id)

    def __repr__(self) -> str:
        return f"KvKey({self.id})"


@dataclass(frozen=True, slots=True)
class KvKeys:
    """``current`` seals and speaks to peers; files may also be of ``previous``."""

    current: KvKey
    previous: KvKey | None = None

    def find(self, id_bytes: bytes) -> KvKey | None:
        """The key of that name, where it is here."""
        for key in (self.current, self.previous):
            if key is not None and key.id_bytes == id_bytes:
                return key
        return None


def kv_keys(config: Config, home: Path) -> KvKeys | None:
    """The keys of ``config``; None where KV bytes are not encrypted. The first start of a cluster makes the file.

    ConfigError: it cannot be read or made, or others than its owner may read it.
    """
    if config.security.kv_encryption == "off":
        return None
    path = config.kv_key_file(home)
    current = _load(path)
    before = path.with_name(path.name + PREVIOUS)
    if not before.exists():
        return KvKeys(current)
    previous = _load(before)
    if previous == current:
        raise ConfigError(f"{PARAM}: {path} and {before} hold the same key; remove one of them", param=PARAM)
    return KvKeys(current, previous)


def _load(path: Path) -> KvKey:
    secret = load_key(path, PARAM)
    require_private(path, PARAM)
    return KvKey.of(secret)
