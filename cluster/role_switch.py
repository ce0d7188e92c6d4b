"""From one role to the other without loading the model anew: who may, and what a restart has to know.

A worker's member id names its process and stays; its role is a word about its newest life. The role it was switched to is
kept in the state folder, so that a restart by the launcher comes back in it; a cluster that is started begins as configured.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from moonpool.cluster.spec import RoleSpec
from moonpool.core.errors import InvalidRequest
from moonpool.core.ids import MemberId, Role
from moonpool.core.membership import Member

SWITCHABLE = (Role.PREFILL, Role.DECODE)
FOLDER = "roles"


def checked_role(text: str, member: Member) -> Role:
    """The role that ``member`` is to switch to. InvalidRequest where it cannot."""
    if text not in [role.value for role in SWITCHABLE]:
        raise InvalidRequest(f"role: {text!r} is none that a worker switches to; use prefill or decode", param="role")
    if member.role not in SWITCHABLE:
        raise InvalidRequest(f"role: {member.id} is a {member.role.value} process, which has no other role", param="role")
    if member.role is Role(text):
        raise InvalidRequest(f"role: {member.id} is a {text} worker already", param="role")
    return Role(text)


def keep_role(state_dir: Path, member: MemberId, role: Role) -> None:
    folder = state_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / f".{member}"
    fresh.write_text(role.value, encoding="utf-8")
    fresh.replace(folder / member)


def in_kept_role(spec: RoleSpec) -> RoleSpec:
    """``spec`` in the role that its process was switched to, if it was."""
    try:
        role = (spec.state_dir / FOLDER / spec.member).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return spec
    switched = role in [r.value for r in SWITCHABLE] and spec.role in SWITCHABLE
    return replace(spec, role=Role(role)) if switched else spec


def forget_roles(state_dir: Path) -> None:
    shutil.rmtree(state_dir / FOLDER, ignore_errors=True)
