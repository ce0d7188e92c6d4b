"""``moonpool keys``: who may use the gateways. The file changes whole or not at all; running gateways follow it."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moonpool.cli.options import AsJson, ConfigFile, Settings, read_config, say

if TYPE_CHECKING:
    from moonpool.cluster.gateway.tenants.book import Book

File = Annotated[Path | None, typer.Option("--file", help="The file of keys; default: security.api_keys_file.")]
Requests = Annotated[int | None, typer.Option("--requests", min=0, help="Requests per minute; 0: no limit.")]
Tokens = Annotated[int | None, typer.Option("--tokens", min=0, help="Prompt and output tokens per minute; 0: no limit.")]
Concurrent = Annotated[int | None, typer.Option("--concurrent", min=0, help="Requests in flight; 0: no limit.")]

MOST_DAYS = 36_500

keys = typer.Typer(help="API keys and tenants of the gateways.", no_args_is_help=True)


@keys.command("add")
def add(
    name: Annotated[str, typer.Argument(help="What the key is called in logs and lists.", show_default=False)],
    tenant: Annotated[str, typer.Option("--tenant", help="Whose requests it makes.")] = "default",
    roles: Annotated[list[str] | None, typer.Option("--role", help="user or admin; may be repeated. Default: user.")] = None,
    requests: Requests = None,
    tokens: Tokens = None,
    concurrent: Concurrent = None,
    priority: Annotated[int, typer.Option("--priority", help="The highest that its requests may claim.")] = 0,
    days: Annotated[float | None, typer.Option("--days", help="It expires after so many; default: never.")] = None,
    file: File = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Make a key and print it: this once, since only a hash of it is kept."""
    from moonpool.cluster.gateway.tenants.file import edit_book, mint
    from moonpool.core.errors import ConfigError

    given = {"requests_per_minute": requests, "tokens_per_minute": tokens, "concurrent": concurrent}
    values: dict[str, Any] = {"name": name, "tenant": tenant, "roles": roles or ["user"], "priority": priority}
    values |= {field: value for field, value in given.items() if value is not None}
    if days is not None:
        if not 0.0 < days <= MOST_DAYS:
            raise ConfigError(f"--days: {days:g} is out of range; use more than 0, up to {MOST_DAYS}", param="--days")
        values["expires"] = (datetime.now(UTC) + timedelta(days=days)).replace(microsecond=0)
    secrets, token = mint()

    def change(book: Book) -> dict[str, Any]:
        return {**book.model_dump(), "keys": [*book.model_dump()["keys"], {**values, **secrets}]}

    path = _path(file, config_file, settings)
    edit_book(path, change)
    say(f"key {name!r} of tenant {tenant!r} is in {path}; it is shown this once:")
    print(token)


@keys.command("tenant")
def tenant(
    name: Annotated[str, typer.Argument(help="The tenant.", show_default=False)],
    weight: Annotated[float | None, typer.Option("--weight", help="Its share where tenants compete; default 1.")] = None,
    region: Annotated[str | None, typer.Option("--region", help="Tenants of one region share cached KV; '': none.")] = None,
    pool_bytes: Annotated[str | None, typer.Option("--pool-bytes", help="Of each store node, as 1GiB; 0: no limit.")] = None,
    models: Annotated[
        list[str] | None, typer.Option("--model", help="A model that it may use; may be repeated. One '': all of them.")
    ] = None,
    ttft_target_ms: Annotated[
        float | None, typer.Option("--ttft-target", metavar="MS", help="Of its requests that carry none; 0: the model's.")
    ] = None,
    tbt_target_ms: Annotated[
        float | None, typer.Option("--tbt-target", metavar="MS", help="Of its requests that carry none; 0: the model's.")
    ] = None,
    requests: Requests = None,
    tokens: Tokens = None,
    concurrent: Concurrent = None,
    file: File = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Set what all keys of a tenant share; what is not given stays."""
    from moonpool.cluster.configure import read_size
    from moonpool.cluster.gateway.tenants.file import edit_book

    given = {
        "weight": weight,
        "region": region,
        "pool_bytes": None if pool_bytes is None else read_size(pool_bytes, "--pool-bytes"),
        "models": None if models is None else [model for model in models if model],
        "ttft_target_ms": ttft_target_ms,
        "tbt_target_ms": tbt_target_ms,
        "requests_per_minute": requests,
        "tokens_per_minute": tokens,
        "concurrent": concurrent,
    }

    def change(book: Book) -> dict[str, Any]:
        values = book.model_dump()
        mine = values["tenants"].get(name, {})
        values["tenants"][name] = mine | {field: value for field, value in given.items() if value is not None}
        return values

    path = _path(file, config_file, settings)
    book = edit_book(path, change)
    if name not in {key.tenant for key in book.keys}:
        say(f"no key in {path} is of tenant {name!r} yet; see `moonpool keys list`")


@keys.command("list")
def list_(as_json: AsJson = False, file: File = None, config_file: ConfigFile = None, settings: Settings = None) -> None:
    """Keys and tenants with their limits. Secrets are not known here, and hashes are not shown."""
    from moonpool.cluster.gateway.tenants.file import read_book

    book = read_book(_path(file, config_file, settings))
    told = book.model_dump(mode="json", exclude={"keys": {"__all__": {"salt", "hash"}}})
    if as_json:
        print(json.dumps(told, indent=2))
        return
    for one, values in zip(book.keys, told["keys"], strict=True):
        expired = one.expires is not None and one.expires <= datetime.now(UTC)
        shown = {"id": one.id, "tenant": one.tenant, "roles": ",".join(one.roles), **_limits(values)}
        print(f"key {one.name:<20} " + "  ".join(f"{k}={v}" for k, v in shown.items()) + ("  EXPIRED" if expired else ""))
    for name in book.tenant_names:
        values = told["tenants"].get(name, {})
        print(f"tenant {name:<17} " + "  ".join(f"{k}={v}" for k, v in _limits(values).items()))


@keys.command("revoke")
def revoke(
    name: Annotated[str, typer.Argument(help="The key's name or id.", show_default=False)],
    file: File = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Take a key out of the file: within seconds no gateway knows it. Requests that run are finished."""
    from moonpool.cluster.gateway.tenants.file import edit_book
    from moonpool.core.errors import InvalidRequest

    path = _path(file, config_file, settings)

    def change(book: Book) -> dict[str, Any]:
        values = book.model_dump()
        left = [key for key in values["keys"] if name not in (key["name"], key["id"])]
        if len(left) == len(values["keys"]):
            raise InvalidRequest(f"NAME: no key in {path} is called {name!r}; see `moonpool keys list`", param="NAME")
        return {**values, "keys": left}

    edit_book(path, change)


def _limits(values: dict[str, Any]) -> dict[str, Any]:
    told = (
        "requests_per_minute", "tokens_per_minute", "concurrent", "priority", "expires", "weight", "region", "pool_bytes",
        "models", "ttft_target_ms", "tbt_target_ms",
    )  # fmt: skip
    return {field: values[field] for field in told if values.get(field)}


def _path(file: Path | None, config_file: Path | None, settings: list[str] | None) -> Path:
    from moonpool.core.errors import ConfigError

    if file is not None:
        return file
    config, _ = read_config(config_file, settings)
    if not config.security.api_keys_file:
        raise ConfigError("security.api_keys_file: not set; give --file, or --set security.api_keys_file=FILE", param="--file")
    return Path(config.security.api_keys_file)
