"""Every dataclass of core that a protobuf message mirrors, and a strategy that makes values of it."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import types
import typing
from enum import Enum
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

import moonpool.core
from moonpool.core.errors import Failure
from moonpool.core.layout import ITEM_BYTES, KVLayout
from moonpool.core.placement import Finished, Refusal
from moonpool.core.request import PromptLogprobs
from moonpool.wire import pb

NAMED_DIFFERENTLY: list[tuple[type, type[Message]]] = [
    (Failure, pb.types.Error),
    (Refusal, pb.types.Error),
    (Finished, pb.conductor.FinishedRequest),
]

RANGES = {
    FieldDescriptor.TYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.TYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.TYPE_DOUBLE: st.floats(allow_nan=False),
    FieldDescriptor.TYPE_FLOAT: st.floats(allow_nan=False, width=32),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=20),
}
text = st.text(st.characters(codec="utf-8"), max_size=12)
MANY = 3
_UINT32 = st.integers(0, 2**32 - 1)


def _messages() -> dict[str, type[Message]]:
    modules = [getattr(pb, name) for name in pb.__all__ if not name.endswith("_rpc")]
    found = {}
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Message):
                found[value.DESCRIPTOR.name] = value
    return found


def _dataclasses() -> dict[str, type]:
    found = {}
    for info in pkgutil.iter_modules(moonpool.core.__path__):
        module = importlib.import_module(f"moonpool.core.{info.name}")
        for value in vars(module).values():
            if isinstance(value, type) and dataclasses.is_dataclass(value):
                found[value.__name__] = value
    return found


def pairs() -> list[tuple[type, type[Message]]]:
    messages, classes = _messages(), _dataclasses()
    same_name = [(cls, messages[name]) for name, cls in sorted(classes.items()) if name in messages]
    sampling = [(classes["SamplingParams"], messages["Sampling"])]
    return [*same_name, *sampling, *NAMED_DIFFERENTLY]


def values(cls: type, message: type[Message]) -> st.SearchStrategy[Any]:
    """Any value of ``cls`` that ``message`` can carry."""
    if cls is KVLayout:
        number, dtypes, tokens = st.integers(0, 2**32 - 1), st.sampled_from(sorted(ITEM_BYTES)), st.integers(1, 512)
        plain = st.builds(KVLayout, text, number, number, number, dtypes, tokens, text, text)
        latents = st.builds(KVLayout, text, number, st.just(1), number, dtypes, tokens, text, text, kind=st.just("mla"))
        return plain | latents
    if cls is PromptLogprobs:
        return st.builds(_prompt_logprobs, _UINT32, st.integers(0, MANY), st.integers(0, MANY), _UINT32)
    hints = typing.get_type_hints(cls)
    by_name = message.DESCRIPTOR.fields_by_name
    return st.builds(cls, **{f.name: _field(hints[f.name], by_name[f.name]) for f in dataclasses.fields(cls)})


def _prompt_logprobs(first: int, n: int, width: int, token: int) -> PromptLogprobs:
    """Its lists agree, or it is none."""
    many = n * width
    return PromptLogprobs(first, width, (-0.5,) * n, (token,) * n, (token,) * many, (-1.5,) * many)


def _field(hint: Any, descriptor: FieldDescriptor) -> st.SearchStrategy[Any]:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        (inner,) = (a for a in typing.get_args(hint) if a is not type(None))
        present = _field(inner, descriptor)
        if not descriptor.has_presence:
            present = present.filter(bool)  # an empty string means None there
        return st.none() | present
    if typing.get_origin(hint) is tuple:
        return st.lists(_one(typing.get_args(hint)[0], descriptor), max_size=MANY).map(tuple)
    if typing.get_origin(hint) is dict:
        return st.dictionaries(text, text, max_size=MANY)
    return _one(hint, descriptor)


def _one(hint: Any, descriptor: FieldDescriptor) -> st.SearchStrategy[Any]:
    while hasattr(hint, "__supertype__"):
        hint = hint.__supertype__
    if dataclasses.is_dataclass(hint):
        name = descriptor.message_type.name
        return values(typing.cast(type, hint), _messages()[name])
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(list(hint))
    if descriptor.type == FieldDescriptor.TYPE_STRING:
        return text
    return RANGES[descriptor.type]
