"""Loads the configuration: TOML file < environment < command line, with every value's origin.

A key is named ``section.key``; the environment writes it ``MOONPOOL_SECTION_KEY``. Values from the environment and the
command line are text: numbers and booleans are read from it, sizes (``..._bytes``, ``..._bytes_per_s``) may carry KiB,
MiB, GiB or TiB, and lists and tables (``JSON_KEYS``) are JSON. An unknown key is refused with the nearest valid one,
wherever it comes from.
"""

from __future__ import annotations

import difflib
import json
import re
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from moonpool.cluster.consistent import WRITE_SIZE, require_consistent
from moonpool.core.config import Config, ModelConfig, NodeConfig
from moonpool.core.errors import ConfigError
from moonpool.core.parsing import read_json, read_toml
from moonpool.core.principal import IDENTITY

PREFIX = "MOONPOOL_"
# Read by tests, scripts and channels, not by the configuration.
NOT_CONFIGURATION = frozenset(
    {
        "MOONPOOL_TRACES",
        "MOONPOOL_CRDS",
        "MOONPOOL_TEST_MODEL",
        "MOONPOOL_FUZZ",
        "MOONPOOL_CLIENTS",
        "MOONPOOL_API_KEY",
        IDENTITY,
    }
)
JSON_KEYS = {
    "cluster.nodes": '[{"name": "a", "prefill": 1}]',
    "model.aliases": '["gpt-4o-mini"]',
    "model.adapters": '{"polite": "/adapters/polite"}',
    "gateway.models": '[{"name": "big", "path": "/models/big"}]',
    "gateway.cors_origins": '["https://chat.example.com"]',
    "cluster.ray_cpus": '{"prefill": 4, "decode": 4}',
    "store.quotas": '{"alice": "1 GiB"}',
    "store.codecs": '["int8"]',
    "store.lossy_for": '["alice"]',
    "scheduler.policy_settings": '{"lookahead_s": 0.5}',
    "scheduler.admission_settings": '{"reserve": 0.1}',
    "scheduler.planner_settings": '{"hold_s": 8}',
}
DEFAULT = "default"
COMMAND_LINE = "command line"

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(KiB|MiB|GiB|TiB)\s*\Z", re.IGNORECASE)
_SIZED = ("_bytes", "_bytes_per_s")
_UNITS = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def sections() -> dict[str, type[BaseModel]]:
    """Section name -> its class of values."""
    found: dict[str, type[BaseModel]] = {}
    for name, field in Config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found[name] = field.annotation
    return found


def all_keys() -> list[str]:
    return [f"{section}.{key}" for section, values in sections().items() for key in values.model_fields]


def variable_of(key: str) -> str:
    return PREFIX + key.replace(".", "_", 1).upper()


def load_config(file: Path | None, env: Mapping[str, str], overrides: Mapping[str, str]) -> tuple[Config, dict[str, str]]:
    """The configuration and, for every ``section.key``, where its value came from. ConfigError names key, value and fix."""
    values: dict[str, Any] = {}
    origins = dict.fromkeys(all_keys(), DEFAULT)
    if file is not None:
        for key, value in _from_file(file).items():
            values[key], origins[key] = value, f"file {file}"
    for key, text in _from_environment(env).items():
        values[key], origins[key] = _from_text(key, text, variable_of(key)), f"environment {variable_of(key)}"
    for key, text in overrides.items():
        _require_known(key, all_keys(), COMMAND_LINE)
        values[key], origins[key] = _from_text(key, text, COMMAND_LINE), COMMAND_LINE
    config = _validate(values, origins)
    require_consistent(config)
    return config, origins


def describe(config: Config, origins: Mapping[str, str]) -> Iterable[tuple[str, str, str]]:
    """(key, value as TOML or JSON text, origin) of every value, in the order of declaration."""
    dumped = config.model_dump(mode="json")
    for key in all_keys():
        section, name = key.split(".")
        yield key, json.dumps(dumped[section][name]), origins[key]


def _from_file(file: Path) -> dict[str, Any]:
    try:
        data = read_toml(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"config: cannot read {file}: {reason}; give a TOML file", param="config") from e
    except ValueError as e:
        raise ConfigError(f"config: {file} is not TOML: {e}", param="config") from e
    values: dict[str, Any] = {}
    for section, table in data.items():
        _require_known(section, sections(), f"file {file}")
        if not isinstance(table, dict):
            raise ConfigError(f"{section}: {table!r} in {file} is not a table; write [{section}]", param=section)
        for key, value in table.items():
            name = f"{section}.{key}"
            _require_known(name, all_keys(), f"file {file}")
            values[name] = value
    return values


def _from_environment(env: Mapping[str, str]) -> dict[str, str]:
    keys = {variable_of(key): key for key in all_keys()}
    found: dict[str, str] = {}
    for variable in sorted(env):
        if variable.startswith(PREFIX) and variable not in NOT_CONFIGURATION:
            _require_known(variable, keys, "environment")
            found[keys[variable]] = env[variable]
    return found


def _require_known(name: str, valid: Iterable[str], origin: str) -> None:
    names = list(valid)
    if name in names:
        return
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
    raise ConfigError(f"{name}: unknown name ({origin}); did you mean {nearest}?", param=name)


def _field_type(key: str) -> Any:
    section, name = key.split(".")
    return sections()[section].model_fields[name].annotation


def _from_text(key: str, text: str, origin: str) -> Any:
    if key not in JSON_KEYS:
        return text
    try:
        return read_json(text)
    except ValueError as e:
        raise ConfigError(f"{key}: {reprlib.repr(text)} ({origin}) is not JSON; write e.g. {JSON_KEYS[key]}", param=key) from e


def read_size(text: str, name: str) -> int:
    """Bytes from ``1048576`` or ``1 MiB``. ConfigError naming ``name``."""
    size = _size("_bytes", text)
    if isinstance(size, int):
        return size
    if not text.strip().isdecimal():
        raise ConfigError(f"{name}: {text!r} is no size; {WRITE_SIZE}", param=name)
    return int(text)


def _size(key: str, value: Any) -> Any:
    if key == "store.quotas" and isinstance(value, dict):
        return {tenant: _size("_bytes", size) for tenant, size in value.items()}
    match = _SIZE.match(value) if key.endswith(_SIZED) and isinstance(value, str) else None
    return int(float(match[1]) * _UNITS[match[2].lower()]) if match else value


def _validate(values: Mapping[str, Any], origins: Mapping[str, str]) -> Config:
    tree: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, name = key.split(".")
        if isinstance(value, bool) and _field_type(key) is not bool:
            raise ConfigError(f"{key}: {str(value).lower()} ({origins[key]}) is not a {_kind(key)}", param=key)
        tree.setdefault(section, {})[name] = _size(key, value)
    for key, kind in (("cluster.nodes", NodeConfig), ("gateway.models", ModelConfig)):
        _require_known_parts(key, tree.get(key.split(".")[0], {}).get(key.split(".")[1]), kind, origins[key])
    try:
        return Config.model_validate(tree)
    except ValidationError as e:
        raise _explain(e, origins) from e


def _kind(key: str) -> str:
    kind = _field_type(key)
    return {int: "whole number", float: "number"}.get(kind, "text value" if kind is str else "valid value")


def _require_known_parts(key: str, entries: Any, kind: type[BaseModel], origin: str) -> None:
    for entry in entries if isinstance(entries, list) else ():
        for part in entry if isinstance(entry, dict) else ():
            _require_known(str(part), kind.model_fields, f"{key}, {origin}")
        if kind is ModelConfig and isinstance(entry, dict) and not entry.get("path"):
            raise ConfigError(f"{key}: {entry!r} ({origin}) has no path; give every model its own", param=key)


def _explain(error: ValidationError, origins: Mapping[str, str]) -> ConfigError:
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    key, rest = ".".join(path[:2]), "".join(f"[{part}]" for part in path[2:])
    section, _, name = key.partition(".")
    told = sections()[section].model_fields[name].description if name else None
    wanted = first["msg"].replace("Input should be", "must be")
    if (key.endswith(_SIZED) or key == "store.quotas") and first["type"] in ("int_parsing", "float_parsing", "int_from_float"):
        wanted = f"is no size; {WRITE_SIZE}"
    message = f"{key}{rest}: {reprlib.repr(first['input'])} ({origins.get(key, DEFAULT)}) {wanted}"
    return ConfigError(message + (f" ({told})" if told else ""), param=key)
