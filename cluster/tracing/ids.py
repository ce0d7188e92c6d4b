"""Ids of traces and spans, derived from the request's id, so that nothing more has to travel between processes. Pure.

A request's id says which trace it belongs to: its own one, or the client's, where it sent a sampled W3C ``traceparent``.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

_REQUEST = re.compile(r"(req-[0-9a-f]{24}(?:-t([0-9a-f]{32}))?)(?:-([0-9]{1,6}))?\Z")
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?\Z")
_SAMPLED = 0x01
CLIENT_SPAN = "client_span"  # fact of a life at the gateway: the span of the client's, 16 hex digits


@dataclass(frozen=True, slots=True)
class ClientSpan:
    """The span of the client's that a request was sent in: 32 and 16 hex digits."""

    trace: str
    span: str


def client_span(traceparent: str) -> ClientSpan | None:
    """From the header; None where there is none, it is malformed, or the client does not record that trace."""
    match = _TRACEPARENT.match(traceparent.strip())
    if match is None or not int(match[3], 16) & _SAMPLED or not int(match[1], 16) or not int(match[2], 16):
        return None
    return ClientSpan(match[1], match[2])


def request_id(random_hex: str, client: ClientSpan | None) -> str:
    """``random_hex``: 24 digits."""
    return f"req-{random_hex}" + (f"-t{client.trace}" if client else "")


@dataclass(frozen=True, slots=True)
class TraceOf:
    """``base`` names the HTTP request, ``choice`` which of its choices this is; None: it has but one."""

    trace: int
    base: str
    choice: int | None
    by_client: bool

    @property
    def root(self) -> int:
        return span_id(self.base, 0, "request")

    def sampled(self, share: float) -> bool:
        """The same in every process; traces that a client began are always recorded."""
        return self.by_client or self.trace & ((1 << 64) - 1) < share * (1 << 64)


def trace_of(request: str) -> TraceOf | None:
    """None: no client's request, as copies between store nodes are."""
    match = _REQUEST.match(request)
    if match is None:
        return None
    digest = hashlib.blake2b(match[1].encode(), digest_size=16, person=b"moonpool trace").digest()
    trace = int(match[2], 16) if match[2] else int.from_bytes(digest)
    return TraceOf(trace, match[1], None if match[3] is None else int(match[3]), match[2] is not None)


def span_id(request: str, attempt: int, name: str) -> int:
    """Of 64 bits, never 0."""
    text = f"{request}\0{attempt}\0{name}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"moonpool span").digest()) or 1
