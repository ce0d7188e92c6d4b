"""Who asks, as everything after the gate needs it: the tenant, what it may do, and what keeps its KV apart. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from moonpool.cluster.gateway.tenants.book import Access, ApiKey, Tenant
from moonpool.core.use import DEFAULT_TENANT

SALT_BYTES = 16
MOST_URGENT = 100


@dataclass(frozen=True, slots=True)
class Caller:
    """``name`` is the key's; without a file of keys everybody is the default tenant, and may do everything."""

    tenant: str = DEFAULT_TENANT
    name: str = ""
    roles: tuple[Access, ...] = (Access.USER, Access.ADMIN)
    weight: float = 1.0
    region: str = ""
    priority: int = MOST_URGENT  # the highest that its requests may claim
    models: tuple[str, ...] = ()  # that it may use; empty: all
    ttft_target_ms: float = 0.0  # of its requests that say nothing else; 0: the model's
    tbt_target_ms: float = 0.0

    @classmethod
    def of(cls, key: ApiKey, tenant: Tenant) -> Caller:
        return cls(
            key.tenant,
            key.name,
            key.roles,
            tenant.weight,
            tenant.region,
            key.priority,
            tenant.models,
            tenant.ttft_target_ms,
            tenant.tbt_target_ms,
        )

    def may_use(self, model: str) -> bool:
        return not self.models or model in self.models

    def salt(self, hash_key: bytes, cache_salt: str = "") -> bytes:
        """What sets its block keys apart from everybody's but those of its region. Nobody who lacks the cluster's hash key
        can make it, whatever they call themselves. ``cache_salt``: the request's own, which sets it apart further.

        Empty for the default tenant's plain requests: blocks made before there were keys stay findable.
        """
        if self.tenant == DEFAULT_TENANT and not self.region and not cache_salt:
            return b""
        who = ("region", self.region) if self.region else ("tenant", self.tenant)
        mix = hashlib.blake2b(digest_size=SALT_BYTES, key=hash_key, person=b"moonpool tenant")
        for part in (*who, cache_salt):
            raw = part.encode(errors="surrogatepass")
            mix.update(len(raw).to_bytes(4, "little") + raw)
        return mix.digest()


ANYBODY = Caller()
