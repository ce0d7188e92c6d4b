"""Everybody that etcd knows, asked once."""

from __future__ import annotations

from moonpool.cluster.etcd.address import EtcdAddress
from moonpool.cluster.etcd.book import Book
from moonpool.cluster.etcd.client import Away, Etcd
from moonpool.cluster.etcd.login import Login
from moonpool.core.errors import NoPath
from moonpool.core.membership import MemberChange


async def members(registry: str) -> list[MemberChange]:
    """Whoever has no lease any more is said to be silent, also where nobody is left to say so. NoPath without an answer."""
    address = EtcdAddress.parse(registry)
    trouble, login = "", Login.read(address)
    for endpoint in address.endpoints:
        etcd = Etcd(endpoint, lambda: None, login)
        try:
            items, revision = await etcd.read(address.everything)
        except Away as e:
            trouble = str(e)
            continue
        finally:
            etcd.close()
        book = Book(address)
        told = {change.member.id: change for change in book.restart(items, revision)}
        told |= {verdict.change.member.id: verdict.change for verdict in book.verdicts()}
        return list(told.values())
    raise NoPath(f"registry: {registry} does not answer ({trouble}); does etcd run?", retry_after_s=1.0)
