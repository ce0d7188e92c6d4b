#!/usr/bin/env python3
"""Writes docs/reference/ from the code: configuration, commands, HTTP. With --check it only says what differs (exit code 1)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel

from moonpool.cli.main import Choices, build
from moonpool.cluster.configure import sections, variable_of
from moonpool.cluster.gateway.bodies import ChatBody, CompletionBody
from moonpool.core.config import Config, NodeConfig
from moonpool.core.errors import STATUS

FOLDER = Path(__file__).parent.parent / "docs" / "reference"
MADE = "<!-- Written by scripts/reference.py from the code: change the code and run it. -->"
RANGES = {"minimum": "at least {}", "exclusiveMinimum": "above {}", "maximum": "at most {}", "exclusiveMaximum": "below {}"}


def configuration() -> Iterator[str]:
    """One table per section."""
    yield from (MADE, "", "# Configuration", "")
    yield "A TOML file (`--config`) < environment < command line (`--set section.key=value`). Sizes are bytes and take `KiB`,"
    yield "`MiB`, `GiB`, `TiB`; times are milliseconds, unless the name says otherwise. An unknown name is refused with the"
    yield "nearest valid one. `moonpool config show` prints every value with its origin. How they are used:"
    yield "[operations](../operations.md)."
    for name, kind in sections().items():
        yield from ("", f"## [{name}]", "")
        yield from _values(kind, lambda key, section=name: f"<br>`{variable_of(f'{section}.{key}')}`")
    yield from ("", "## [[cluster.nodes]]", "", " ".join((NodeConfig.__doc__ or "").split()), "")
    yield from _values(NodeConfig, lambda key: "")


def _values(kind: type[BaseModel], variable: Any) -> Iterator[str]:
    schema = Config.model_json_schema()["$defs"][kind.__name__]
    yield from ("| key | default | values | |", "| --- | --- | --- | --- |")
    for key, field in kind.model_fields.items():
        default = "required" if field.is_required() else f"`{_toml(field.get_default(call_default_factory=True))}`"
        allowed = _allowed(schema["properties"][key])
        yield f"| `{key}`{variable(key)} | {default} | {allowed} | {_cell(field.description or '')} |"


def _toml(value: Any) -> str:
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_defaults=True)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1 << 20 and value % (1 << 20) == 0:
        return f"{value >> 30} GiB" if value % (1 << 30) == 0 else f"{value >> 20} MiB"
    return json.dumps(value)


def _allowed(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(f"`{one}`" for one in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    words = [text.format(_number(schema[name])) for name, text in RANGES.items() if name in schema]
    if "maxLength" in schema:
        words.append(f"at most {schema['maxLength']:,} characters")
    if "maxItems" in schema and schema.get("type") == "array" and "prefixItems" not in schema:
        words.append(f"at most {schema['maxItems']:,} of them")
    kinds = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false", "object": "table"}
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_allowed(one) for one in schema["anyOf"] if one.get("type") != "null"))
    if schema.get("type") == "array":
        items = schema.get("items", {})
        return ", ".join([f"list of: {_allowed(items)}" if items else "list", *words])
    return ", ".join([kinds.get(schema.get("type", ""), "table"), *words])


def _number(value: float) -> str:
    whole = int(value)
    return f"{whole:,}" if whole == value else str(value)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def commands() -> Iterator[str]:
    """Every verb with its options, as ``--help`` says them."""
    yield from (MADE, "", "# Commands", "")
    yield "`moonpool --debug VERB` shows tracebacks. Exit codes and what to expect of each verb:"
    yield "[operations](../operations.md#verbs)."
    yield from _command("moonpool", typer.main.get_command(build(Choices())), 2)


def _command(path: str, command: Any, depth: int) -> Iterator[str]:
    inner = getattr(command, "commands", None)
    for name, one in (inner or {}).items():
        whole = f"{path} {name}"
        yield from ("", f"{'#' * min(depth, 4)} `{whole}`", "", _plain(one.help or ""))
        shown = [p for p in one.params if not getattr(p, "hidden", False) and p.name != "help"]
        if shown and not getattr(one, "commands", None):
            yield from ("", "| option | default | |", "| --- | --- | --- |")
            for param in shown:
                yield f"| {_names(param)} | {_default(param)} | {_cell(getattr(param, 'help', '') or '')} |"
        yield from _command(whole, one, depth + 1)


def _plain(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _names(param: Any) -> str:
    if param.param_type_name == "argument":
        return f"`{(param.metavar or param.name).upper()}`"
    return ", ".join(f"`{name}`" for name in (*param.opts, *param.secondary_opts))


def _default(param: Any) -> str:
    if param.required:
        return "required"
    value = param.default
    if value is None or value == "" or value == () or callable(value) or not getattr(param, "show_default", True):
        return ""
    if param.secondary_opts or value is False:
        return f"`{str(value).lower()}`" if value else ""
    return f"`{getattr(value, 'value', value)}`"


def http() -> Iterator[str]:
    """Bodies of the two generating routes, and reasons of errors."""
    yield from (MADE, "", "# HTTP: fields and errors", "")
    yield "What each field does beyond its range is in [HTTP API](../api.md); a running gateway serves `/openapi.json`."
    for title, kind in (("POST /v1/chat/completions", ChatBody), ("POST /v1/completions", CompletionBody)):
        yield from ("", f"## {title}", "", "| field | values | default | |", "| --- | --- | --- | --- |")
        schema = kind.model_json_schema()
        for name, field in schema["properties"].items():
            default = "required" if name in schema.get("required", ()) else f"`{json.dumps(field.get('default'))}`"
            text = _cell(field.get("description", ""))
            yield f"| `{name}` | {_allowed(_followed(field, schema))} | {default} | {text} |"
    yield from ("", "## Reasons", "", "`error.code` of refusals and failures.", "", "| code | HTTP status |", "| --- | --- |")
    for reason, (status, _) in STATUS.items():
        yield f"| `{reason.value}` | {status} |"


def _followed(field: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """References replaced, as deep as a table can show."""
    if "$ref" in field:
        found: dict[str, Any] = schema["$defs"][field["$ref"].rsplit("/", 1)[-1]]
        return {"type": "object"} if found.get("type") == "object" else found
    if "anyOf" in field:
        return {**field, "anyOf": [_followed(one, schema) for one in field["anyOf"]]}
    if "items" in field:
        return {**field, "items": _followed(field["items"], schema)}
    return field


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a page is not up to date")
    check = parser.parse_args().check
    old = []
    for name, lines in (("configuration", configuration), ("commands", commands), ("http", http)):
        page, text = FOLDER / f"{name}.md", "\n".join(lines()) + "\n"
        if check and (not page.exists() or page.read_text(encoding="utf-8") != text):
            old.append(str(page.relative_to(FOLDER.parent.parent)))
        elif not check:
            page.write_text(text, encoding="utf-8")
    if old:
        print(f"not what the code says: {', '.join(old)}; run .venv/bin/python scripts/reference.py", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
