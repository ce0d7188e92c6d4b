"""``moonpool certs VERB``: certificates of processes that no launcher makes them for. Keys stay where they were made."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moonpool.cli.options import AsJson, ClusterName, ConfigFile, Settings, read_config, say

if TYPE_CHECKING:
    from moonpool.cluster.identity.authority import Authority
    from moonpool.core.config import Config

certs = typer.Typer(help="Certificates of the processes of a cluster (security.tls = files).", no_args_is_help=True)

HTTPS = "https"

AuthorityFolder = Annotated[
    Path | None,
    typer.Option("--authority", help="Folder of the certificate authority, made where there is none; default: STATE/tls/ca."),
]
Days = Annotated[int, typer.Option("--days", min=1, max=3650, help="How long they are good.")]
Folders = Annotated[list[Path] | None, typer.Argument(metavar="[FOLDER]...", help="Default: all of this cluster on this host.")]


@certs.command("make")
def make(
    role: Annotated[
        str, typer.Option("--role", help="store, prefill, decode, both, conductor, gateway, registry, launcher, operator.")
    ] = "operator",
    member: Annotated[str, typer.Option("--id", help="Member id; default: the role's name.")] = "",
    https: Annotated[
        list[str] | None,
        typer.Option("--https", metavar="HOST", help="Of a gateway's HTTPS, for this name or address."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder of the files; default: STATE/tls/ID or STATE/https.")
    ] = None,
    days: Days = 90,
    authority: AuthorityFolder = None,
    name: ClusterName = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Make ca.pem, cert.pem and key.pem of one process, signed by the cluster's authority."""
    from moonpool.cluster.identity.authority import utc_now
    from moonpool.cluster.identity.folders import FOLDER

    config, _ = read_config(config_file, settings, {"cluster.name": name})
    principal = _principal(config, role, member)
    folder = out or Path(config.cluster.state_dir) / (HTTPS if https else f"{FOLDER}/{principal.member}")
    signer = _authority(config, authority)
    if https:
        ends = signer.issue_https(folder, https, timedelta(days=days), utc_now())
    else:
        ends = signer.issue(folder, principal, timedelta(days=days), utc_now())
    say(f"{', '.join(https) if https else principal.uri}: until {ends:%Y-%m-%d %H:%M} UTC")
    print(folder)


@certs.command("show")
def show(
    folders: Folders = None,
    name: ClusterName = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Who each certificate speaks for, and until when. Exit code 1 where one is of no use or has expired."""
    from moonpool.cluster.identity.authority import utc_now
    from moonpool.cluster.identity.told import shown

    config, _ = read_config(config_file, settings, {"cluster.name": name})
    rows: list[dict[str, Any]] = []
    for one in map(shown, folders or _folders(config)):
        row: dict[str, Any] = {"folder": str(one.folder), "trouble": one.trouble}
        if one.says:
            row |= {"uri": one.says.principal.uri, "ends": one.says.ends.isoformat(), "left_s": one.says.left_s(utc_now())}
            row["trouble"] = "expired" if row["left_s"] <= 0 else ""
        rows.append(row)
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        for row in rows:
            told = f"{row['uri']}  until {row['ends'][:16].replace('T', ' ')} UTC" if "uri" in row else ""
            print("  ".join(part for part in (row["folder"], told, row["trouble"]) if part))
    raise typer.Exit(any(row["trouble"] for row in rows))


@certs.command("renew")
def renew(
    folders: Folders = None,
    days: Days = 90,
    authority: AuthorityFolder = None,
    name: ClusterName = None,
    config_file: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Sign the same names and keys anew, also expired ones. Running processes take them up without a restart."""
    from moonpool.cluster.identity.authority import utc_now
    from moonpool.cluster.identity.told import shown
    from moonpool.core.errors import ConfigError

    config, _ = read_config(config_file, settings, {"cluster.name": name})
    signer = _authority(config, authority)
    for one in map(shown, folders or _folders(config)):
        if one.says is None:
            raise ConfigError(one.trouble)
        ends = signer.issue(one.folder, one.says.principal, timedelta(days=days), utc_now())
        say(f"{one.says.principal.uri}: until {ends:%Y-%m-%d %H:%M} UTC")


def _principal(config: Config, role: str, member: str) -> Any:
    from moonpool.core.errors import ConfigError
    from moonpool.core.ids import checked_name
    from moonpool.core.principal import Party, Principal

    parties = [party.value for party in Party]
    if role not in parties:
        raise ConfigError(f"--role: {role!r} is unknown; use one of {', '.join(parties)}", param="--role")
    return Principal(config.cluster.name, Party(role), checked_name(member or role, "--id"))


def _authority(config: Config, folder: Path | None) -> Authority:
    from moonpool.cluster.identity.authority import Authority, utc_now
    from moonpool.cluster.identity.folders import authority_folder

    return Authority.open(folder or authority_folder(config), config.cluster.name, utc_now())


def _folders(config: Config) -> list[Path]:
    from moonpool.cluster.identity.folders import FOLDER
    from moonpool.cluster.identity.told import folders_below
    from moonpool.core.errors import ConfigError

    files = config.security.tls == "files"
    where = Path(config.security.tls_dir) if files else Path(config.cluster.state_dir) / FOLDER
    found = list(folders_below(where))
    if not found:
        raise ConfigError(f"certs: there is none in {where}; `moonpool certs make`, or name a folder")
    return found
