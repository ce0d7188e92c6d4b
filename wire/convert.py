"""Dataclasses of ``core`` to protobuf messages and back, by field name.

A message mirrors its dataclass, so one walk over the dataclass's fields serves all of them. Rules: an absent message,
an absent ``optional`` scalar and an empty string are None where the dataclass allows None; an absent ``optional`` scalar is
the dataclass's default where it has another one; tuples are repeated fields.
Values are checked on the way in (enums by name, ids by type), so a malformed message is an InvalidRequest.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from enum import Enum
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from moonpool.core.errors import InvalidRequest, UserError

T = TypeVar("T")
M = TypeVar("M", bound=Message)


@dataclasses.dataclass(frozen=True)
class _Field:
    name: str
    kind: type  # dataclass, enum, or the scalar's own type
    many: bool
    optional: bool
    mapping: bool
    defaulted: bool  # a scalar that may be left out


def _plain(hint: Any) -> Any:
    while hasattr(hint, "__supertype__"):  # NewType
        hint = hint.__supertype__
    return hint


_table: dict[type, tuple[_Field, ...]] = {}  # filled once per dataclass; idempotent, so threads need no lock


def _fields(cls: type) -> tuple[_Field, ...]:
    found = _table.get(cls)
    if found is None:
        found = _table[cls] = _read_fields(cls)
    return found


def _read_fields(cls: type) -> tuple[_Field, ...]:
    hints = typing.get_type_hints(cls)
    out = []
    for f in dataclasses.fields(cls):
        hint, many, optional, mapping = hints[f.name], False, False, False
        if typing.get_origin(hint) in (types.UnionType, typing.Union):
            (hint,) = (a for a in typing.get_args(hint) if a is not type(None))
            optional = True
        if typing.get_origin(hint) is tuple:
            hint, many = hint.__args__[0], True
        elif typing.get_origin(hint) is dict:
            hint, mapping = dict, True
        kind = _plain(hint)
        scalar = not (many or optional or mapping or dataclasses.is_dataclass(kind))
        defaulted = scalar and f.default is not dataclasses.MISSING
        out.append(_Field(f.name, kind, many, optional, mapping, defaulted))
    return tuple(out)


def to_wire(value: Any, message: M) -> M:
    """Fill ``message`` (an empty one of the mirroring type) from the dataclass ``value``; returns it."""
    for f in _fields(type(value)):
        item = getattr(value, f.name)
        if item is None:
            continue
        if f.mapping:
            getattr(message, f.name).update(item)
        elif f.many and dataclasses.is_dataclass(f.kind):
            target = getattr(message, f.name)
            for one in item:
                to_wire(one, target.add())
        elif f.many:
            getattr(message, f.name).extend(item)
        elif dataclasses.is_dataclass(f.kind):
            target = getattr(message, f.name)
            target.SetInParent()
            to_wire(item, target)
        else:
            setattr(message, f.name, item.value if isinstance(item, Enum) else item)
    return message


def _present(message: Message, f: _Field) -> bool:
    descriptor = message.DESCRIPTOR.fields_by_name[f.name]
    if descriptor.has_presence:
        return message.HasField(f.name)
    return bool(getattr(message, f.name))


def _is_absent(message: Message, f: _Field) -> bool:
    return message.DESCRIPTOR.fields_by_name[f.name].has_presence and not message.HasField(f.name)


def from_wire(message: Message, cls: type[T]) -> T:
    """The dataclass ``cls`` read from its mirroring ``message``. InvalidRequest names the field that does not fit."""
    values: dict[str, Any] = {}
    for f in _fields(cls):
        raw = getattr(message, f.name)
        try:
            if f.optional and not _present(message, f):
                values[f.name] = None
            elif f.defaulted and _is_absent(message, f):
                continue
            elif f.mapping:
                values[f.name] = dict(raw)
            elif f.many and dataclasses.is_dataclass(f.kind):
                values[f.name] = tuple(from_wire(one, f.kind) for one in raw)
            elif f.many:
                values[f.name] = tuple(raw)
            elif dataclasses.is_dataclass(f.kind):
                values[f.name] = from_wire(raw, f.kind)
            elif issubclass(f.kind, Enum):
                values[f.name] = f.kind(raw)
            else:
                values[f.name] = raw
        except ValueError as e:
            raise InvalidRequest(f"{cls.__name__}.{f.name}: {e}", param=f.name) from e
    try:
        return cls(**values)
    except UserError as e:  # the dataclass checks itself
        raise InvalidRequest(f"{cls.__name__}: {e.message}", param=e.param) from e


def parse(data: bytes, kind: type[M]) -> M:
    """The message of type ``kind`` in ``data``; InvalidRequest where it is none. Bound the size of ``data`` before."""
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as e:
        raise InvalidRequest(f"{kind.__name__}: {len(data)} bytes are no such message: {e}", param="data") from e
    return message
