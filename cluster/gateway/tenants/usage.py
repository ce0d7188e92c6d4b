"""What each tenant took, for Prometheus. Labels are names from the file of keys, never a client's words."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from moonpool.cluster.gateway.shapes import Usage

MAX_TENANTS = 1_000  # further ones are counted together: names may come and go in the file while the gateway runs
OTHERS = "(others)"


class TenantUsage:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._seen: set[str] = set()
        self._requests = Counter(
            "moonpool_gateway_tenant_requests", "HTTP requests by tenant and how they ended", ["tenant", "outcome"],
            registry=registry,
        )  # fmt: skip
        self._tokens = Counter(
            "moonpool_gateway_tenant_tokens", "tokens by tenant: prompt, cached of these, output", ["tenant", "kind"],
            registry=registry,
        )  # fmt: skip

    def count(self, tenant: str, outcome: str, usage: Usage) -> None:
        if tenant not in self._seen and len(self._seen) >= MAX_TENANTS:
            tenant = OTHERS
        self._seen.add(tenant)
        self._requests.labels(tenant, outcome).inc()
        for kind, tokens in (("prompt", usage.prompt), ("cached", usage.cached), ("output", usage.completion)):
            if tokens:
                self._tokens.labels(tenant, kind).inc(tokens)
