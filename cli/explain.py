"""``moonpool explain``: why requests went where they went, and what another policy would have done."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from moonpool.cli.explain_text import comparison_text, decision_line, request_text
from moonpool.cli.options import AsJson, ClusterName, ConfigFile, Settings, say
from moonpool.cli.running import find


def explain(
    request_id: Annotated[
        str, typer.Argument(metavar="[REQUEST_ID]", help="The id of an answer, or its header x-moonpool-request-id.")
    ] = "",
    last: Annotated[int, typer.Option("--last", min=0, help="So many of the newest decisions, one a line.")] = 0,
    record: Annotated[Path | None, typer.Option("--record", help="Write what the conductor heard and decided there.")] = None,
    conductor: Annotated[str, typer.Option("--conductor", help="Whose record, where there are several.")] = "",
    replay: Annotated[Path | None, typer.Option("--replay", help="A record to ask another policy about.")] = None,
    policy: Annotated[str, typer.Option("--policy", help="That other policy.")] = "moonpool",
    setting: Annotated[
        list[str] | None, typer.Option("--policy-setting", metavar="NAME=NUMBER", help="One of its numbers; may be repeated.")
    ] = None,
    name: ClusterName = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Why a request went where it went: inputs, candidates, predicted and actual times, regret."""
    from moonpool.core.errors import InvalidRequest

    chosen = [bool(request_id), last > 0, record is not None, replay is not None]
    if sum(chosen) != 1:
        raise InvalidRequest("explain: give one of REQUEST_ID, --last, --record and --replay", param="REQUEST_ID")
    if replay is not None:
        _replay(replay, policy, setting or [], as_json)
        return
    registry = find(name, config_file, settings).registry
    if record is not None:
        _record(registry, record, conductor, as_json)
    elif last:
        _newest(registry, last, as_json)
    else:
        _one(registry, request_id, as_json)


def _one(registry: str, request_id: str, as_json: bool) -> None:
    from moonpool.cluster import explaining
    from moonpool.core.errors import InvalidRequest

    asked = request_id.removeprefix("chatcmpl-").removeprefix("cmpl-")  # as the answer's own id has it
    told = asyncio.run(explaining.of_request(registry, asked))
    if told is None:
        raise InvalidRequest(
            f"REQUEST_ID: no conductor remembers {request_id!r}; give the id of an answer (or its header "
            "x-moonpool-request-id); the newest requests only are kept"
        )
    print(json.dumps(told, indent=2) if as_json else request_text(told))


def _newest(registry: str, last: int, as_json: bool) -> None:
    from moonpool.cluster import explaining

    told = asyncio.run(explaining.newest(registry, last))
    if as_json:
        print(json.dumps(told, indent=2))
        return
    for one in told:
        print(f"{one['conductor']}:")
        for decision in one["decisions"]:
            print(decision_line(decision))


def _record(registry: str, path: Path, conductor: str, as_json: bool) -> None:
    from moonpool.cluster import explaining

    who, entries = asyncio.run(explaining.save_record(registry, path, conductor))
    if as_json:
        print(json.dumps({"conductor": who, "entries": entries, "file": str(path)}))
    else:
        say(f"{path}: {entries} entries of {who}; ask another policy with `moonpool explain --replay {path} --policy NAME`")


def _replay(path: Path, policy: str, setting: list[str], as_json: bool) -> None:
    from moonpool.cluster.record_file import read_record
    from moonpool.scheduler.counterfactual import counterfactual
    from moonpool.scheduler.policies.make import make_policy

    other = make_policy(policy, dict(_number(one) for one in setting))
    head, entries = read_record(path)
    figures: dict[str, Any] = counterfactual(entries, other, booking_s=head.booking_s).figures()
    figures |= {"recorded_policy": head.policy, "conductor": head.conductor, "entries": len(entries), "cut": head.cut}
    print(json.dumps(figures, indent=2) if as_json else comparison_text(figures))


def _number(text: str) -> tuple[str, float]:
    from moonpool.core.errors import InvalidRequest

    name, equals, value = text.partition("=")
    try:
        if not equals:
            raise ValueError
        return name.strip(), float(value)
    except ValueError:
        raise InvalidRequest(
            f"--policy-setting: {text!r} is no NAME=NUMBER; write e.g. --policy-setting lookahead_s=0.5", param="policy-setting"
        ) from None
