"""Which carriers can keep strangers out where KV bytes are encrypted. Pure."""

from __future__ import annotations

from moonpool.core.config import TransferConfig
from moonpool.core.errors import ConfigError

UNSEALED = frozenset({"ucx", "ucxx"})


def require_sealable(config: TransferConfig) -> None:
    """ConfigError for a carrier that cannot keep strangers out.

    UCX lets whoever reaches its port write into registered memory, at any time and without the owner's help: also into
    slots whose bytes were checked already. Its two-sided form has no sealed messages here.
    """
    if config.carrier in UNSEALED:
        raise ConfigError(
            f"transfer.carrier: {config.carrier!r} cannot be protected by security.kv_encryption: UCX does not know who "
            "writes into its memory; set transfer.carrier to 'auto' or 'tcp'",
            param="transfer.carrier",
        )
