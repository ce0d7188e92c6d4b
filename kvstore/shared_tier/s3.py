"""Objects in S3-compatible storage, through ``obstore`` (extra ``s3``). Credentials come from the environment (AWS_*)."""

from __future__ import annotations

import os
import re
from datetime import timedelta

import numpy as np
from numpy.typing import NDArray

from moonpool.core.config import StoreConfig
from moonpool.core.errors import ConfigError

_URL = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(?P<prefix>.*))?")
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
FALLBACK_REGION = "us-east-1"
CONNECT_SHARE = 0.5  # of the time an operation has


class Bucket:
    """No retries here: the tier above pauses and counts. Faults are OSError."""

    def __init__(self, config: StoreConfig) -> None:
        """ConfigError: not a bucket's URL, or ``obstore`` is not installed. Nothing is asked of the storage yet."""
        found = _URL.fullmatch(config.shared_path)
        if found is None:
            raise ConfigError(
                f"store.shared_path: {config.shared_path} names no bucket; use s3://bucket/prefix", param="store.shared_path"
            )
        try:
            import obstore
            from obstore.exceptions import BaseError, NotFoundError
            from obstore.store import S3Store
        except ImportError as e:
            raise ConfigError(
                "store.shared_path: object storage needs obstore; install moonpool[s3]", param="store.shared_path"
            ) from e
        self._calls = obstore
        self._faults = (BaseError, OSError)
        self._missing = (NotFoundError, FileNotFoundError)
        endpoint = config.shared_endpoint or _first(ENDPOINTS)
        if endpoint and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"store.shared_endpoint: {endpoint} is no URL; use http://host:port or https://host",
                param="store.shared_endpoint",
            )
        timeout = timedelta(milliseconds=config.shared_timeout_ms)
        try:
            self._store = S3Store(
                found["bucket"],
                prefix=(found["prefix"] or "").strip("/") or None,
                config={"region": _first(REGIONS) or FALLBACK_REGION, **({"endpoint": endpoint} if endpoint else {})},
                client_options={
                    "timeout": timeout,
                    "connect_timeout": timeout * CONNECT_SHARE,
                    "allow_http": endpoint.startswith("http://"),
                },
                retry_config={"max_retries": 0, "retry_timeout": timeout},
            )
        except BaseError as e:
            raise ConfigError(f"store.shared_endpoint: {endpoint}: {_said(e)}", param="store.shared_endpoint") from e

    def size(self, name: str) -> int | None:
        try:
            return int(self._calls.head(self._store, name)["size"])
        except self._missing:
            return None
        except self._faults as e:
            raise OSError(_said(e)) from e

    def get(self, name: str, size: int) -> NDArray[np.uint8] | None:
        try:
            found = self._calls.get(self._store, name)
            if found.meta["size"] != size:
                return np.empty(0, np.uint8)
            return np.frombuffer(memoryview(found.bytes()), np.uint8)
        except self._missing:
            return None
        except self._faults as e:
            raise OSError(_said(e)) from e

    def put(self, name: str, data: NDArray[np.uint8]) -> None:
        try:
            self._calls.put(self._store, name, data.data, use_multipart=False)
        except self._faults as e:
            raise OSError(_said(e)) from e

    def remove(self, name: str) -> bool:
        """Storage of this kind does not say whether there was one, so it is asked first."""
        if self.size(name) is None:
            return False
        try:
            self._calls.delete(self._store, name)
        except self._faults as e:
            raise OSError(_said(e)) from e
        return True


def _first(names: tuple[str, ...]) -> str:
    return next((value for name in names if (value := os.environ.get(name))), "")


def _said(e: Exception) -> str:
    """The first line; what follows is for debugging the client."""
    return str(e).partition("\n")[0].strip()
