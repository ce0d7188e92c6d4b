"""``moonpool store copy``, ``move`` and ``drain``: blocks from node to node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from moonpool.cli import store_view
from moonpool.cli.options import AsJson, ClusterName, ConfigFile, Settings
from moonpool.cli.running import find
from moonpool.cli.store_calls import ask, blocks_of, change, complete, end, somebody_is_there
from moonpool.cli.store_options import Chat, DryRun, From, Keys, Prompt, Seconds, To, Yes

if TYPE_CHECKING:
    from moonpool.cluster.store_control import StoreControl
    from moonpool.cluster.store_replies import Reply


def copy(
    source: From,
    target: To,
    keys: Keys = None,
    prompt: Prompt = None,
    chat: Chat = False,
    following: Annotated[bool, typer.Option("--following", help="Also what continues the last of the blocks.")] = False,
    dry_run: DryRun = False,
    seconds: Seconds = 60.0,
    name: ClusterName = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Bring blocks that one node holds to another one, and keep them there."""
    running = find(name, config_file, settings)
    chosen = blocks_of(running, keys, prompt, chat)

    async def work(control: StoreControl) -> list[Reply]:
        copied = control.copy(chosen, source, target, following=following, dry_run=dry_run, deadline_s=seconds)
        return [await copied]

    replies = ask(running, None, work)
    store_view.show(replies, as_json)
    end(replies, done=complete(replies[0]))


def move(
    source: From,
    target: To,
    keys: Keys = None,
    prompt: Prompt = None,
    chat: Chat = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    seconds: Seconds = 60.0,
    name: ClusterName = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Copy blocks, and what continues the last of them, to another node; then drop them where they were."""
    running = find(name, config_file, settings)
    chosen = blocks_of(running, keys, prompt, chat)
    replies = change(
        running,
        None,
        lambda control, dry: control.move(chosen, source, target, dry_run=dry, deadline_s=seconds),
        dry_run,
        yes,
    )
    store_view.show(replies, as_json)
    end(replies, done=complete(replies[0]) and not any(r.facts.get("kept") for r in replies))


def drain(
    node: Annotated[str, typer.Option("--node", help="The node that is to leave.")],
    yes: Yes = False,
    seconds: Seconds = 60.0,
    name: ClusterName = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Make a node ready to leave: it takes nothing new, and copies to others what nobody else holds."""
    running = find(name, config_file, settings)
    if not yes and somebody_is_there():
        typer.confirm(f"Node {node} takes no new blocks from then on, until it starts anew. Go on?", abort=True, err=True)
    replies = ask(running, None, lambda control: control.move_out(node, deadline_s=seconds))
    store_view.show(replies, as_json)
    end(replies, done=not any(r.facts.get("blocks_left") for r in replies))
