"""Traces where the configuration asks for them; without, nothing of OpenTelemetry is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from moonpool.core.config import ObserveConfig
from moonpool.core.errors import ConfigError
from moonpool.core.ids import MemberId

if TYPE_CHECKING:
    from moonpool.cluster.tracing.spans import Spans


def traces_of(observe: ObserveConfig, cluster: str, member: MemberId) -> Spans | None:
    """ConfigError where the endpoint is no URL, or the packages are missing."""
    if not observe.otlp_endpoint:
        return None
    _require_url(observe.otlp_endpoint)
    try:
        from moonpool.cluster.tracing.spans import Spans
    except ImportError as e:
        raise ConfigError(
            f"observe.otlp_endpoint: traces need a package that is not installed ({e.name}); pip install 'moonpool[otel]'",
            param="observe.otlp_endpoint",
        ) from e
    return Spans.to(observe.otlp_endpoint, observe.sample, cluster, member)


def _require_url(endpoint: str) -> None:
    if "@" in endpoint:
        raise ConfigError(
            "observe.otlp_endpoint: a user or password in it would be shown by `config show`; leave them out, and set "
            "OTEL_EXPORTER_OTLP_HEADERS",
            param="observe.otlp_endpoint",
        )
    try:
        url = urlsplit(endpoint)
        known = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # a port that is none
        known = False
    if not known:
        raise ConfigError(
            f"observe.otlp_endpoint: {endpoint!r} is no URL; write http://HOST:4318", param="observe.otlp_endpoint"
        )
