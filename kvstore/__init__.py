"""Blocks: where they live and how they move. ``StoreClient`` is for everybody; it is imported when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moonpool.kvstore.library.items import Put
    from moonpool.kvstore.library.store_client import StoreClient
    from moonpool.kvstore.library.sync_client import SyncStoreClient

__all__ = ["Put", "StoreClient", "SyncStoreClient"]


def __getattr__(name: str) -> Any:
    match name:
        case "Put":
            from moonpool.kvstore.library.items import Put

            return Put
        case "StoreClient":
            from moonpool.kvstore.library.store_client import StoreClient

            return StoreClient
        case "SyncStoreClient":
            from moonpool.kvstore.library.sync_client import SyncStoreClient

            return SyncStoreClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
