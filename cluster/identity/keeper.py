"""Renews the certificates of ``tls = auto`` in time, as long as whoever started the processes lives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from moonpool.cluster.identity.authority import LIFE
from moonpool.cluster.identity.folders import make_for
from moonpool.core.config import Config
from moonpool.core.errors import ConfigError
from moonpool.core.principal import Party

EVERY_S = LIFE.total_seconds() / 3  # two renewals may fail


class Keeper:
    """``make`` makes certificates anew for the processes it is given."""

    def __init__(
        self,
        config: Config,
        say: Callable[[str], None],
        *,
        every_s: float = EVERY_S,
        make: Callable[[Config, Iterable[tuple[Party, str]]], None] = make_for,
    ) -> None:
        self._config, self._say, self._every_s, self._make = config, say, every_s, make
        self._processes: set[tuple[Party, str]] = set()
        self._renewing: asyncio.Task[None] | None = None

    def add(self, *processes: tuple[Party, str]) -> None:
        """Makes certificates for ``processes`` now, and from time to time. ConfigError where that is not possible now."""
        if self._config.security.tls != "auto":
            return
        self._make(self._config, processes)
        self._processes |= set(processes)
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._renew(), name="renew-certificates")

    async def close(self) -> None:
        if self._renewing:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await asyncio.to_thread(self._make, self._config, sorted(self._processes))
            except ConfigError as e:
                self._say(f"certificates are not renewed: {e.message}")
