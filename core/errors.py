"""One exception tree and one table from reason codes to HTTP and gRPC status.

MoonpoolError
├── UserError            the caller can mend it: the message names field, value and fix
│   ├── InvalidRequest   a field is malformed or out of range
│   ├── Unauthorised     no API key, or none that is known and in force
│   ├── Forbidden        the key's roles do not allow it
│   ├── UnknownModel
│   ├── ContextLength    prompt and output do not fit the model's context
│   ├── PromptTooLarge   the body, or the prompt, is above what this deployment accepts
│   ├── ConfigError      configuration file, environment or command line
│   └── UnsupportedModel a model directory that the engine refuses, by name
├── Refused              good request, not now; carries ``retry_after_s``
│   ├── TargetsMissed    no placement meets the request's own targets
│   ├── Overloaded       a bounded queue is full
│   ├── RateLimited      the key or its tenant has used up what it may ask for
│   └── NoPath           no prefill worker, decode worker or conductor is reachable
├── AttemptFailed        one attempt ended; the gateway may start the next one
│   ├── Busy             a worker or a store node said no; place again
│   ├── Moved            a worker that leaves gives it back in order; the next try is not counted
│   ├── PeerSilent       a peer process died, froze or became unreachable
│   ├── TransferFailed   a carrier gave up
│   └── DigestMismatch   bytes differ from their digest: the copy is quarantined, the block is a miss
├── DeadlinePassed
├── Cancelled
├── LayoutMismatch       two processes disagree on KV layout, hash key or version; both values are named
└── Bug                  an illegal transition; carries the story of the request
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar


class Reason(StrEnum):
    INVALID_REQUEST = "invalid_request"
    UNAUTHORISED = "invalid_api_key"
    FORBIDDEN = "permission_denied"
    UNKNOWN_MODEL = "unknown_model"
    CONTEXT_LENGTH = "context_length_exceeded"
    PROMPT_TOO_LARGE = "prompt_too_large"
    CONFIG = "config"
    UNSUPPORTED_MODEL = "unsupported_model"
    TARGETS_MISSED = "targets_missed"
    OVERLOADED = "overloaded"
    RATE_LIMITED = "rate_limit_exceeded"
    NO_PATH = "no_path"
    BUSY = "busy"
    MOVED = "moved"
    PEER_SILENT = "peer_silent"
    TRANSFER_FAILED = "transfer_failed"
    DIGEST_MISMATCH = "digest_mismatch"
    DEADLINE = "deadline_passed"
    CANCELLED = "cancelled"
    LAYOUT_MISMATCH = "layout_mismatch"
    BUG = "internal_error"


# reason -> (HTTP status, gRPC status name). 499 is the widely used "client closed request".
STATUS: dict[Reason, tuple[int, str]] = {
    Reason.INVALID_REQUEST: (400, "INVALID_ARGUMENT"),
    Reason.UNAUTHORISED: (401, "UNAUTHENTICATED"),
    Reason.FORBIDDEN: (403, "PERMISSION_DENIED"),
    Reason.UNKNOWN_MODEL: (404, "NOT_FOUND"),
    Reason.CONTEXT_LENGTH: (400, "INVALID_ARGUMENT"),
    Reason.PROMPT_TOO_LARGE: (413, "INVALID_ARGUMENT"),
    Reason.CONFIG: (500, "FAILED_PRECONDITION"),
    Reason.UNSUPPORTED_MODEL: (500, "FAILED_PRECONDITION"),
    Reason.TARGETS_MISSED: (429, "RESOURCE_EXHAUSTED"),
    Reason.OVERLOADED: (429, "RESOURCE_EXHAUSTED"),
    Reason.RATE_LIMITED: (429, "RESOURCE_EXHAUSTED"),
    Reason.NO_PATH: (503, "UNAVAILABLE"),
    Reason.BUSY: (503, "RESOURCE_EXHAUSTED"),
    Reason.MOVED: (503, "UNAVAILABLE"),
    Reason.PEER_SILENT: (503, "UNAVAILABLE"),
    Reason.TRANSFER_FAILED: (503, "UNAVAILABLE"),
    Reason.DIGEST_MISMATCH: (503, "DATA_LOSS"),
    Reason.DEADLINE: (504, "DEADLINE_EXCEEDED"),
    Reason.CANCELLED: (499, "CANCELLED"),
    Reason.LAYOUT_MISMATCH: (409, "FAILED_PRECONDITION"),
    Reason.BUG: (500, "INTERNAL"),
}


class MoonpoolError(Exception):
    """Base of every error raised on purpose. ``param`` is the offending field, where there is one."""

    reason: ClassVar[Reason] = Reason.BUG

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    @property
    def http_status(self) -> int:
        return STATUS[self.reason][0]

    @property
    def grpc_status(self) -> str:
        return STATUS[self.reason][1]


class UserError(MoonpoolError):
    reason = Reason.INVALID_REQUEST


class InvalidRequest(UserError):
    reason = Reason.INVALID_REQUEST


class Unauthorised(UserError):
    reason = Reason.UNAUTHORISED


class Forbidden(UserError):
    reason = Reason.FORBIDDEN


class UnknownModel(UserError):
    reason = Reason.UNKNOWN_MODEL


class ContextLength(UserError):
    reason = Reason.CONTEXT_LENGTH


class PromptTooLarge(UserError):
    reason = Reason.PROMPT_TOO_LARGE


class ConfigError(UserError):
    reason = Reason.CONFIG


class UnsupportedModel(UserError):
    reason = Reason.UNSUPPORTED_MODEL


class Refused(MoonpoolError):
    reason = Reason.OVERLOADED

    def __init__(self, message: str, *, retry_after_s: float, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class TargetsMissed(Refused):
    reason = Reason.TARGETS_MISSED


class Overloaded(Refused):
    reason = Reason.OVERLOADED


class RateLimited(Refused):
    reason = Reason.RATE_LIMITED


class NoPath(Refused):
    """``missing``: roles that are not there, where that is known."""

    reason = Reason.NO_PATH

    def __init__(self, message: str, *, retry_after_s: float, param: str | None = None, missing: tuple[str, ...] = ()) -> None:
        super().__init__(message, retry_after_s=retry_after_s, param=param)
        self.missing = missing


class AttemptFailed(MoonpoolError):
    """One attempt ended. ``peer`` is the worker or node to exclude from the next one, where it is known."""

    reason = Reason.TRANSFER_FAILED

    def __init__(self, message: str, *, peer: str | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class Busy(AttemptFailed):
    reason = Reason.BUSY


class Moved(AttemptFailed):
    reason = Reason.MOVED


class PeerSilent(AttemptFailed):
    reason = Reason.PEER_SILENT


class TransferFailed(AttemptFailed):
    reason = Reason.TRANSFER_FAILED


class DigestMismatch(AttemptFailed):
    reason = Reason.DIGEST_MISMATCH


class DeadlinePassed(MoonpoolError):
    reason = Reason.DEADLINE


class Cancelled(MoonpoolError):
    reason = Reason.CANCELLED


class LayoutMismatch(MoonpoolError):
    reason = Reason.LAYOUT_MISMATCH


class Bug(MoonpoolError):
    reason = Reason.BUG


def _by_reason() -> dict[Reason, type[MoonpoolError]]:
    found: dict[Reason, type[MoonpoolError]] = {}
    stack: list[type[MoonpoolError]] = [MoonpoolError]
    while stack:
        cls = stack.pop()
        stack.extend(cls.__subclasses__())
        if not cls.__subclasses__():
            found[cls.reason] = cls
    return found


def error_for(
    reason: Reason,
    message: str,
    *,
    retry_after_s: float = 1.0,
    peer: str | None = None,
    param: str | None = None,
) -> MoonpoolError:
    """The exception for a reason code that arrived over a wire."""
    cls = _by_reason()[reason]
    if issubclass(cls, Refused):
        return cls(message, retry_after_s=retry_after_s, param=param)
    if issubclass(cls, AttemptFailed):
        return cls(message, peer=peer)
    return cls(message, param=param)


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as it travels between processes; ``peer`` is whom to exclude from the next attempt, or empty."""

    reason: Reason
    message: str
    peer: str = ""
    retry_after_s: float = 0.0

    def to_exception(self) -> MoonpoolError:
        return error_for(self.reason, self.message, retry_after_s=self.retry_after_s, peer=self.peer or None)

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Any exception as a Failure; one that is not ours is a Bug named by its type, without its traceback."""
        if isinstance(error, MoonpoolError):
            peer = error.peer if isinstance(error, AttemptFailed) else None
            wait = error.retry_after_s if isinstance(error, Refused) else 0.0
            return cls(error.reason, error.message, peer or "", wait)
        return cls(Reason.BUG, f"{type(error).__name__}: {error}")
