"""Traces where the configuration asks for them; without, nothing of OpenTelemetry is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moonpool.core.config import ObserveConfig
from moonpool.core.errors import ConfigError
from moonpool.core.ids import MemberId

if TYPE_CHECKING:
    from moonpool.cluster.tracing.spans import Spans


def traces_of(observe: ObserveConfig, cluster: str, member: MemberId) -> Spans | None:
    """ConfigError where the endpoint is no URL, or the packages are missing."""
    if not observe.otlp_endpoint:
        return None
    if not observe.otlp_endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"observe.otlp_endpoint: {observe.otlp_endpoint!r} is no URL; write http://HOST:4318", param="observe.otlp_endpoint"
        )
    try:
        from moonpool.cluster.tracing.spans import Spans
    except ImportError as e:
        raise ConfigError(
            f"observe.otlp_endpoint: traces need a package that is not installed ({e.name}); pip install 'moonpool[otel]'",
            param="observe.otlp_endpoint",
        ) from e
    return Spans.to(observe.otlp_endpoint, observe.sample, cluster, member)
