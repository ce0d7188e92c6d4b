"""The cluster as the gateway needs it: is there a path, how much fits, under which layout are blocks named."""

from __future__ import annotations

from moonpool.cluster.gateway.limits import Limits
from moonpool.cluster.gateway.tenants.caller import ANYBODY, Caller
from moonpool.core.blocks import BlockHasher, namespace
from moonpool.core.ids import Incarnation, MemberId, Role
from moonpool.core.membership import Member, Peers
from moonpool.core.request import Adapter


class Roster:
    """``max_context`` is the model's own limit; workers may announce less."""

    def __init__(self, peers: Peers, hash_key: bytes, max_context: int) -> None:
        self._peers = peers
        self._hash_key = hash_key
        self._max_context = max_context

    def life_of(self, member: MemberId) -> Incarnation | None:
        change = self._peers.get(member)
        return change.member.incarnation if change is not None else None

    def _ready(self, *roles: Role) -> list[Member]:
        return [m for role in roles for m in self._peers.live(role) if m.ready]

    def missing(self) -> list[Role]:
        """Roles without which no request can be served: empty when a path exists."""
        found = [] if self._ready(Role.CONDUCTOR) else [Role.CONDUCTOR]
        if self._ready(Role.BOTH):
            return found
        found += [role for role in (Role.PREFILL, Role.DECODE) if not self._ready(role)]
        decode = self._ready(Role.DECODE)
        if decode and not any(self._peers.store_of(m.node) for m in decode):  # nowhere for a prompt's KV to land
            found.append(Role.STORE)
        return found

    def limits(self) -> Limits:
        """Of the workers there are. A sequence must also fit the pages of one decode worker."""
        decode = self._ready(Role.DECODE, Role.BOTH)
        prefill = self._ready(Role.PREFILL, Role.BOTH)
        bounds = [
            max((n for n in said if n), default=0) for said in ([m.max_context for m in decode], [m.max_prompt for m in decode])
        ]
        context = min([self._max_context, *(b for b in bounds if b)])
        return Limits(context=context, prompt=max((m.max_prompt for m in prefill), default=0) or context)

    def hasher(
        self, caller: Caller = ANYBODY, cache_salt: str = "", adapter: Adapter | None = None
    ) -> tuple[BlockHasher, bytes] | None:
        """Hasher and namespace of the workers' layout, which ``caller`` shares with its tenant or region only and nobody with
        another ``adapter``; None while no worker is known."""
        layouts = [m.layout for m in self._ready(Role.DECODE, Role.BOTH, Role.PREFILL) if m.layout is not None]
        if not layouts:
            return None
        digest, salt = adapter.digest if adapter else "", caller.salt(self._hash_key, cache_salt)
        named = namespace(layouts[0], adapter=digest, tenant_salt=salt)
        return BlockHasher(self._hash_key, named, layouts[0].block_tokens), named

    def hasher_of(self, namespace: bytes) -> BlockHasher | None:
        """Names blocks under ``namespace``, one that was made for the workers' layout; None while no worker is known."""
        named = self.hasher()
        return BlockHasher(self._hash_key, namespace, named[0].block_tokens) if named else None
