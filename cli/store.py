"""``moonpool store VERB``: what operators ask of the pooled store, and do to it, on one node or on all.

Exit codes: 0, all of it was done; 1, some of it was not (a node did not answer, blocks were in use, or none was found);
2, the call itself was wrong, and nothing changed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Annotated

import typer

from moonpool.cli import store_moves, store_view
from moonpool.cli.options import AsJson, ClusterName, ConfigFile, Settings, say
from moonpool.cli.running import Running, find
from moonpool.cli.store_calls import ask, blocks_of, change, end, require_prompt
from moonpool.cli.store_options import Chat, Codec, DryRun, Keys, Nodes, Prompt, Tenant, Yes

store = typer.Typer(help="Look into the pooled store, and change what it holds.", no_args_is_help=True)

POOL = "Memory of the pool, e.g. 1GiB, all of it taken at the start. 0, or not given: half of what is free."

store.command("copy")(store_moves.copy)
store.command("move")(store_moves.move)
store.command("drain")(store_moves.drain)


@store.command("serve")
def serve(
    pool: Annotated[str | None, typer.Option("--pool", metavar="SIZE", help=POOL)] = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """A store node by itself in the foreground, for users of the library on this host; no cluster, no model.

    One at a time in a state folder (cluster.state_dir). The other verbs of `moonpool store` are about clusters.
    """
    import sys

    from moonpool.cli.options import read_config
    from moonpool.cluster.alone import serve_alone

    config, origins = read_config(config_file, settings, {"store.pool_bytes": pool})
    if origins["cluster.name"] == "default" and origins["cluster.state_dir"] == "default":
        config, _ = read_config(config_file, settings, {"store.pool_bytes": pool, "cluster.name": "store"})
    sys.exit(asyncio.run(serve_alone(config, say)))


@store.command("lookup")
def lookup(
    keys: Keys = None,
    prompt: Prompt = None,
    chat: Chat = False,
    node: Nodes = None,
    blocks: Annotated[bool, typer.Option("--blocks", help="One line a block.")] = False,
    name: ClusterName = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """How many leading blocks of a prompt each node holds, and where. Pins nothing."""
    running = find(name, config_file, settings)
    chosen = blocks_of(running, keys, prompt, chat)
    replies = ask(running, node, lambda control: control.inspect(chosen))
    store_view.show(replies, as_json, rows=blocks)
    end(replies, done=any(r.facts.get("leading") for r in replies))


@store.command("pin")
def pin(
    tenant: Tenant,
    keys: Keys = None,
    prompt: Prompt = None,
    chat: Chat = False,
    hard: Annotated[bool, typer.Option("--hard/--soft", help="Never evicted; or evicted last.")] = False,
    node: Nodes = None,
    name: ClusterName = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Keep blocks until `unpin`, on the tenant's budget."""
    running = find(name, config_file, settings)
    chosen = blocks_of(running, keys, prompt, chat)
    replies = ask(running, node, lambda control: control.hold(chosen, tenant, hard=hard))
    store_view.show(replies, as_json)
    end(replies, done=any(r.facts.get("held") for r in replies))


@store.command("unpin")
def unpin(
    tenant: Tenant,
    keys: Keys = None,
    prompt: Prompt = None,
    chat: Chat = False,
    node: Nodes = None,
    name: ClusterName = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """End what `pin` began for the tenant."""
    running = find(name, config_file, settings)
    chosen = blocks_of(running, keys, prompt, chat)
    replies = ask(running, node, lambda control: control.unhold(chosen, tenant))
    store_view.show(replies, as_json)
    end(replies, done=any(r.facts.get("released") for r in replies))


@store.command("compress")
def compress(
    codec: Codec,
    keys: Keys = None,
    prompt: Prompt = None,
    chat: Chat = False,
    node: Nodes = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    name: ClusterName = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Replace full copies by smaller, lossy ones, for models and tenants that allow it (store.lossy_for)."""
    running = find(name, config_file, settings)
    chosen = blocks_of(running, keys, prompt, chat)
    replies = change(running, node, lambda control, dry: control.compress(chosen, codec, dry_run=dry), dry_run, yes)
    store_view.show(replies, as_json)
    end(replies, done=any(r.facts.get("compressed") for r in replies))


@store.command("clear")
def clear(
    keys: Keys = None,
    prompt: Prompt = None,
    chat: Chat = False,
    model: Annotated[str | None, typer.Option("--model", help="Model name, or its fingerprint.")] = None,
    tenant: Annotated[str | None, typer.Option("--tenant", help="Blocks that this tenant stored.")] = None,
    everything: Annotated[bool, typer.Option("--everything", help="All blocks of the nodes.")] = False,
    node: Nodes = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    name: ClusterName = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Drop blocks that nobody uses: of a model, of a tenant, all; or a prompt's last block with all that continues it."""
    from moonpool.cluster.store_control import What
    from moonpool.core.errors import InvalidRequest

    running = find(name, config_file, settings)
    by_key = bool(keys) or prompt is not None
    if sum((by_key, model is not None, tenant is not None, everything)) != 1:
        raise InvalidRequest("clear: say what by exactly one of --keys, --prompt, --model, --tenant, --everything")
    for option, named in (("--model", model), ("--tenant", tenant)):
        if named == "":
            raise InvalidRequest(f"{option}: it is empty; name one", param=option)
    require_prompt(chat, prompt)
    chosen = blocks_of(running, keys, prompt, chat) if by_key else []
    what = What(tuple(chosen[-1:] if prompt is not None else chosen), model or "", tenant or "", everything)
    replies = change(running, node, lambda control, dry: control.clean(control.resolved(what), dry_run=dry), dry_run, yes)
    store_view.show(replies, as_json)
    met = any(r.facts.get("cleared") or r.facts.get("kept") for r in replies)
    if not met and not everything and not all(r.trouble for r in replies):
        say("moonpool: nothing was found: no node holds such blocks")
    end(replies, done=(met or everything) and not any(r.facts.get("kept") for r in replies))


@store.command("quota")
def quota(
    tenant: Annotated[str | None, typer.Option("--tenant", help="Whose quota to set; not `default`, who has none.")] = None,
    size: Annotated[str | None, typer.Option("--bytes", help="Bytes of a node's pool (KiB, MiB, GiB); 0: no quota.")] = None,
    node: Nodes = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    name: ClusterName = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """What each tenant fills and may fill; with --tenant and --bytes, set it until the node restarts."""
    from moonpool.cluster.configure import read_size
    from moonpool.core.errors import InvalidRequest

    running = find(name, config_file, settings)
    if (tenant is None) != (size is None):
        raise InvalidRequest("quota: give --tenant and --bytes to set one, neither to see all")
    if tenant is None or size is None:
        replies = ask(running, node, lambda control: control.quotas())
        store_view.show(replies, as_json, rows=True)
    else:
        limit = read_size(size, "--bytes")
        replies = change(
            running,
            node,
            lambda control, dry: control.set_quota(tenant, limit, dry_run=dry),
            dry_run,
            yes,
            harmless=lambda plan: not any(r.facts.get("above") for r in plan),
        )
        store_view.show(replies, as_json)
        for one in replies:
            if one.facts and limit > int(one.facts["pool_bytes"]):
                say(f"moonpool: node {one.node}: the quota is above its whole pool, and so limits nothing there")
    end(replies, done=True)


@store.command("stats")
def stats(
    node: Nodes = None,
    full: Annotated[bool, typer.Option("--full", help="Every number and word.")] = False,
    name: ClusterName = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """What the nodes hold, and how they fare."""
    replies = ask(find(name, config_file, settings), node, lambda control: control.stats())
    store_view.stats(replies, as_json, full)
    end(replies, done=True)


@store.command("watch")
def watch(
    node: Nodes = None,
    name: ClusterName = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Block events as they happen, until interrupted."""
    running = find(name, config_file, settings)
    try:
        asyncio.run(_watch(running, node or [], as_json))
    except KeyboardInterrupt:
        say("")


async def _watch(running: Running, nodes: Sequence[str], as_json: bool) -> None:
    from moonpool.cluster.store_control import StoreControl
    from moonpool.cluster.store_events import StoreEvents

    async with await StoreControl.open(running.registry, nodes):  # a node that is not there is said at once
        pass
    async for line in StoreEvents(running.registry, running.config.timing, nodes).lines():
        print(json.dumps(line.to_json()) if as_json else store_view.words(line), flush=True)
