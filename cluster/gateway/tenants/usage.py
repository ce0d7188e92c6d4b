"""What each tenant took, for Prometheus. Labels are names from the file of keys, never a client's words."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from moonpool.cluster.gateway.metrics import counter
from moonpool.cluster.gateway.shapes import Usage
from moonpool.cluster.probe.catalogue import of_gateway as declared

MAX_TENANTS = 1_000  # further ones are counted together: names may come and go in the file while the gateway runs
OTHERS = "(others)"


class TenantUsage:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._seen: set[str] = set()
        self._requests = counter(declared.TENANT_REQUESTS, registry)
        self._tokens = counter(declared.TENANT_TOKENS, registry)

    def count(self, tenant: str, outcome: str, usage: Usage) -> None:
        if tenant not in self._seen and len(self._seen) >= MAX_TENANTS:
            tenant = OTHERS
        self._seen.add(tenant)
        self._requests.labels(tenant, outcome).inc()
        for kind, tokens in (("prompt", usage.prompt), ("cached", usage.cached), ("output", usage.completion)):
            if tokens:
                self._tokens.labels(tenant, kind).inc(tokens)
