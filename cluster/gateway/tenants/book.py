"""Who may use the gateway: API keys, the tenants they belong to, their roles and limits. Pure; see docs/security.md.

A key is ``mp_ID_SECRET``, the secret 256 random bits. The book holds a salted BLAKE2b of it: against so many random bits a
slow hash would gain nothing, and a fast one refuses a flood of wrong keys cheaply. Which key is meant says its id; whether
it is right is compared in constant time, also where there is no such id.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from moonpool.core.errors import ConfigError, Unauthorised
from moonpool.core.parsing import read_toml
from moonpool.core.use import DEFAULT_TENANT

FIELD = "security.api_keys_file"
PREFIX = "mp_"
ID_CHARS = 12
SECRET_BYTES = 32
SALT_BYTES = 16
MAX_KEYS = 10_000
MAX_TOKEN_CHARS = 128
_NAMED = ("name", "tenant", "region", "[key]")
_NAME_RULE = "must be up to 64 letters, digits, dots, dashes and underscores, the first one a letter or digit"
_MODEL_RULE = "must be the name of a model: up to 200 characters, no quote, backslash or control character among them"
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"

Name = Annotated[str, Field(pattern=_NAME)]
ModelName = Annotated[str, Field(pattern=r'^[^"\\\x00-\x1f\x7f]{1,200}$')]  # nothing in it needs escaping in TOML


class Access(StrEnum):
    """What a key may do: generate, or operate."""

    USER = "user"
    ADMIN = "admin"


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Limits(_Entry):
    """0: none. Of the whole cluster: each gateway enforces its part of them."""

    requests_per_minute: int = Field(0, ge=0)
    tokens_per_minute: int = Field(0, ge=0, description="prompt and output together")
    concurrent: int = Field(0, ge=0, description="requests in flight")


class Tenant(Limits):
    """What all keys of one tenant share."""

    weight: float = Field(1.0, gt=0, le=1_000, description="its share where tenants compete")
    region: str = Field("", pattern=r"^$|" + _NAME, description="tenants of one region share cached KV; empty: with nobody")
    pool_bytes: int = Field(0, ge=0, description="of a store node's memory that it may fill; 0: as much as there is")
    models: tuple[ModelName, ...] = Field((), description="names of models that it may use; empty: all")
    ttft_target_ms: float = Field(0.0, ge=0, description="TTFT target of its requests that carry none; 0: the model's")
    tbt_target_ms: float = Field(0.0, ge=0, description="TBT target of its requests that carry none; 0: the model's")


class ApiKey(Limits):
    id: str = Field(pattern=rf"^[0-9a-f]{{{ID_CHARS}}}$")
    name: Name
    tenant: Name = DEFAULT_TENANT
    roles: tuple[Access, ...] = (Access.USER,)
    salt: str = Field(pattern=rf"^[0-9a-f]{{{2 * SALT_BYTES}}}$", repr=False)
    hash: str = Field(pattern=r"^[0-9a-f]{64}$", repr=False)
    priority: int = Field(0, ge=-100, le=100, description="the highest that its requests may claim")
    expires: datetime | None = None

    @field_validator("expires")
    @classmethod
    def _zoned(cls, at: datetime | None) -> datetime | None:
        return at if at is None or at.tzinfo is not None else at.replace(tzinfo=UTC)

    def fits(self, token: str) -> bool:
        return hmac.compare_digest(digest(token, bytes.fromhex(self.salt)), self.hash)


class Book(_Entry):
    """Everything in one file of keys."""

    tenants: dict[Name, Tenant] = Field(default_factory=dict)
    keys: tuple[ApiKey, ...] = Field((), max_length=MAX_KEYS)

    @field_validator("keys")
    @classmethod
    def _distinct(cls, keys: tuple[ApiKey, ...]) -> tuple[ApiKey, ...]:
        for what in ("id", "name"):
            seen = [getattr(key, what) for key in keys]
            if len(set(seen)) < len(seen):
                twice = next(name for name in seen if seen.count(name) > 1)
                raise ValueError(f"two keys have the {what} {twice!r}")
        return keys

    def tenant(self, name: str) -> Tenant:
        return self.tenants.get(name, _UNNAMED)

    @property
    def tenant_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self.tenants, *(key.tenant for key in self.keys)]))


_UNNAMED = Tenant()
_NOBODY = ApiKey(id="0" * ID_CHARS, name="nobody", salt="00" * SALT_BYTES, hash="00" * 32)


class Keys:
    """A book looked up by key."""

    def __init__(self, book: Book) -> None:
        self.book = book
        self._by_id = {key.id: key for key in book.keys}

    def holder(self, authorization: str | None, now: datetime) -> ApiKey:
        """The key in an ``Authorization`` header. Unauthorised where there is none, or none that is known and in force."""
        if not authorization:
            raise Unauthorised("Authorization: missing; send `Authorization: Bearer KEY`", param="authorization")
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            raise Unauthorised("Authorization: not a bearer token; send `Authorization: Bearer KEY`", param="authorization")
        known = self._by_id.get(token[len(PREFIX) : len(PREFIX) + ID_CHARS], _NOBODY)
        if len(token) > MAX_TOKEN_CHARS or not known.fits(token) or known is _NOBODY:
            raise Unauthorised("Authorization: this API key is not known here; ask for another one", param="authorization")
        if known.expires is not None and now >= known.expires:
            raise Unauthorised(
                f"Authorization: API key {known.name!r} expired at {known.expires.isoformat()}; ask for another one",
                param="authorization",
            )
        return known


def digest(token: str, salt: bytes) -> str:
    return hashlib.blake2b(token.encode(errors="replace"), digest_size=32, key=salt).hexdigest()


def new_token(id: bytes, secret: bytes) -> str:
    """The key itself, which is shown once. ``id``: 6 random bytes; ``secret``: ``SECRET_BYTES`` of them."""
    return f"{PREFIX}{id.hex()}_{base64.urlsafe_b64encode(secret).decode().rstrip('=')}"


def parse(text: str, where: str) -> Book:
    """ConfigError naming the entry that is wrong; no value of a secret field is ever in its text."""
    try:
        values = read_toml(text)
    except ValueError as e:
        raise ConfigError(f"{FIELD}: {where} is not valid TOML: {e}", param=FIELD) from None
    return checked(values, where)


def checked(values: dict[str, Any], where: str) -> Book:
    """As ``parse``, of the values themselves."""
    try:
        return Book.model_validate(values)
    except ValidationError as e:
        first = e.errors(include_url=False, include_input=False, include_context=False)[0]
        entry = ".".join(str(part) for part in first["loc"])
        odd = first["type"] == "string_pattern_mismatch"
        told = (
            _NAME_RULE
            if odd and first["loc"][-1] in _NAMED
            else _MODEL_RULE
            if odd and "models" in first["loc"]
            else first["msg"]
        )
        told = told.removeprefix("Value error, ").replace("Input should be", "must be")
        raise ConfigError(f"{FIELD}: {where}: {entry}: {told}", param=FIELD) from None


def to_toml(book: Book) -> str:
    """Only what differs from the defaults is written."""
    parts = ["# API keys of a Moonpool gateway, written by `moonpool keys`. Comments are not kept.\n"]
    for name, tenant in book.tenants.items():
        parts.append(f'[tenants."{name}"]\n' + _lines(tenant.model_dump(exclude_defaults=True)))
    for key in book.keys:
        parts.append("[[keys]]\n" + _lines({"tenant": key.tenant, **key.model_dump(exclude_defaults=True)}))
    return "\n".join(parts)


def _lines(values: dict[str, Any]) -> str:
    return "".join(f"{name} = {_value(value)}\n" for name, value in values.items())


def _value(value: Any) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_value(one) for one in value) + "]"
    if isinstance(value, str):
        return f'"{value}"'  # names, hex and roles: nothing to escape
    return str(value)
