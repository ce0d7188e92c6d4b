"""The console's routes: its page, open to everybody, and what it shows, for admins only."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from fastapi import APIRouter, Request
from fastapi.responses import Response

from moonpool.cluster.gateway.console.console import Console
from moonpool.cluster.gateway.console.pages import HEADERS, INDEX, Page, read_pages
from moonpool.core.config import Config
from moonpool.core.errors import Forbidden, InvalidRequest

MOST_ID_CHARS = 200
_FRESH = {**HEADERS, "cache-control": "no-store"}


def console_router(console: Console, config: Config) -> APIRouter:
    router, pages = APIRouter(prefix="/console", include_in_schema=False), read_pages()

    @router.get("")
    async def index(request: Request) -> Response:
        return _page(request, pages[INDEX])

    @router.get("/static/{name}")
    async def static(request: Request, name: str) -> Response:
        return _page(request, pages[name]) if name in pages else Response(status_code=404, headers=HEADERS)

    @router.get("/api/cluster")
    async def cluster(request: Request) -> Response:
        require_own_name(request.headers, config)
        return _fresh(await console.cluster.get())

    @router.get("/api/requests")
    async def requests(request: Request) -> Response:
        require_own_name(request.headers, config)
        return _fresh(await console.requests.get())

    @router.get("/api/request/{name}")
    async def one_request(request: Request, name: str) -> Response:
        require_own_name(request.headers, config)
        return _fresh(await console.request.get(checked_id(name)))

    return router


def _page(request: Request, page: Page) -> Response:
    headers = {**HEADERS, "cache-control": "no-cache", "etag": page.etag, "content-type": page.kind}
    if request.headers.get("if-none-match") == page.etag:
        return Response(status_code=304, headers=headers)
    return Response(page.body, headers=headers)


def _fresh(body: bytes) -> Response:
    return Response(body, headers=_FRESH, media_type="application/json")


def checked_id(name: str) -> str:
    """The request's own id, whichever of its names was given. InvalidRequest where it is none."""
    name = name.removeprefix("chatcmpl-").removeprefix("cmpl-")
    if not 0 < len(name) <= MOST_ID_CHARS or not (name.isascii() and name.isprintable()):
        raise InvalidRequest(f"request: {name[:40]!r} is no request id; give the id of an answer", param="request")
    return name


def require_own_name(headers: Mapping[str, str], config: Config) -> None:
    """Forbidden to pages of other sites, whatever ``gateway.cors_origins`` allows them elsewhere.

    Without API keys a browser's word for who asks is all there is: a site whose name was made to lead here must not read this
    cluster, so it has to be asked for by address, as localhost, or by a configured name.
    """
    origin = headers.get("origin", "")
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none") or (
        origin and _host_of(origin) != headers.get("host", "").lower()
    ):
        raise Forbidden("console: it is for its own page only, not for those of other sites")
    if config.security.api_keys_file:
        return
    host = headers.get("host", "").lower()
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name == "localhost" or name.endswith(".localhost") or name in (config.gateway.host, config.cluster.host):
        return
    try:
        ipaddress.ip_address(name)
    except ValueError:
        raise Forbidden(
            f"console: asked for as {name[:80]!r} without API keys; ask by address, as localhost, or set security.api_keys_file"
        ) from None


def _host_of(origin: str) -> str | None:
    """With its port; None where it is no URL."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None
