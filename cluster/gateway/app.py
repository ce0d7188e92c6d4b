"""The HTTP face: routes, and errors in OpenAI's shape wherever they come from."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from moonpool.cluster.gateway.bodies import ChatBody, CompletionBody, parse_chat, parse_completion
from moonpool.cluster.gateway.endpoints import Endpoints
from moonpool.cluster.gateway.http import error_response, json_response
from moonpool.cluster.gateway.roster import Roster
from moonpool.core.errors import MoonpoolError


def build_app(
    endpoints: Endpoints,
    roster: Roster,
    *,
    check_model: Callable[[str], None],
    model: str,
    metrics: Callable[[str], tuple[bytes, str]],
) -> FastAPI:
    """``metrics`` renders them as an Accept header asks for; ``check_model`` raises UnknownModel."""
    app = FastAPI(title="Moonpool", docs_url=None, redoc_url=None)
    created = int(time.time())

    def card() -> dict[str, Any]:
        return {
            "id": model,
            "object": "model",
            "created": created,
            "owned_by": "moonpool",
            "max_model_len": roster.limits().context,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [card()]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        check_model(name)
        return json_response(card())

    @app.post("/v1/completions", openapi_extra=_body(CompletionBody))
    async def completions(request: Request) -> Response:
        return await endpoints.answer(request, "completions", parse_completion)

    @app.post("/v1/chat/completions", openapi_extra=_body(ChatBody))
    async def chat(request: Request) -> Response:
        return await endpoints.answer(request, "chat", parse_chat)

    @app.get("/health")
    async def health() -> Response:
        """This process answers; nothing is said about others."""
        return json_response({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        """503 until a conductor and a whole path from prompt to tokens exist; names what is missing."""
        missing = ["gateway"] if endpoints.leaving else [str(role) for role in roster.missing()]
        if missing:
            return json_response({"status": "not ready", "missing": missing}, status=503, headers={"retry-after": "1"})
        return json_response({"status": "ready"})

    @app.get("/metrics")
    async def metrics_text(request: Request) -> Response:
        page, kind = metrics(request.headers.get("accept", ""))
        return Response(page, headers={"content-type": kind})

    @app.exception_handler(MoonpoolError)
    async def ours(request: Request, error: MoonpoolError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def theirs(request: Request, error: HTTPException) -> Response:
        message = (
            f"{request.method} {request.url.path[:200]}: {str(error.detail).lower()}; see /openapi.json for what is offered"
        )
        value = {"message": message, "type": "invalid_request_error", "param": None, "code": "no_such_route"}
        return json_response({"error": value}, status=error.status_code, headers=error.headers)

    return app


def _body(kind: type[CompletionBody] | type[ChatBody]) -> dict[str, Any]:
    schema = kind.model_json_schema(ref_template="{model}")
    inlined = _inline(schema, schema.pop("$defs", {}))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inlined}}}}


def _inline(value: Any, defs: dict[str, Any]) -> Any:
    """References replaced by what they name: routes that read their own bodies have no place to put definitions."""
    if isinstance(value, dict):
        ref = value.get("$ref")
        if isinstance(ref, str):
            return _inline(defs[ref], defs)
        return {k: _inline(v, defs) for k, v in value.items()}
    if isinstance(value, list):
        return [_inline(v, defs) for v in value]
    return value
