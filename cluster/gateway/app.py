"""The HTTP face: routes, and errors in OpenAI's shape wherever they come from."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from moonpool.cluster.gateway.bodies import ChatBody, CompletionBody, parse_chat, parse_completion
from moonpool.cluster.gateway.endpoints import Endpoints
from moonpool.cluster.gateway.http import error_response, json_response
from moonpool.cluster.gateway.not_offered import CODE, refusal_of
from moonpool.cluster.gateway.served import Models, Served
from moonpool.cluster.gateway.tenants.guard import caller_of
from moonpool.core.errors import MoonpoolError, UnknownModel

ALL = "*"


def build_app(
    endpoints: Endpoints,
    models: Models,
    *,
    metrics: Callable[[str], tuple[bytes, str]],
    routers: Sequence[APIRouter] = (),
) -> FastAPI:
    """``metrics`` renders them as an Accept header asks for; ``routers`` bring further routes, below paths of their own."""
    app = FastAPI(title="Moonpool", docs_url=None, redoc_url=None)
    created = int(time.time())

    @app.get("/v1/models")
    async def all_models(request: Request) -> Response:
        """Every name and alias that this caller may use: some clients look theirs up here, and take the first otherwise."""
        served = models.of(caller_of(request))
        names = [(one.name, one) for one in served]
        names += [(name, one) for one in served for name in one.names if name != one.name]
        return json_response({"object": "list", "data": [_card(name, one, created) for name, one in names]})

    @app.get("/v1/models/{name:path}")
    async def one_model(request: Request, name: str) -> Response:
        return json_response(_card(name, models.find(name, caller_of(request)), created))

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
    async def ready(model: str = "") -> Response:
        """503 until a conductor and a whole path from prompt to tokens exist, of any model; names what is missing.

        Of the one that ``model`` names, or of all (*), where that is asked.
        """
        missing = _missing(models, model)
        if endpoints.leaving:
            missing = ["gateway"]
        count = {"models": len(models.all), "models_ready": len(models.all) - len(models.lacking())}
        several = count if len(models.all) > 1 else {}
        if missing:
            told = {"status": "not ready", "missing": missing, **several}
            return json_response(told, status=503, headers={"retry-after": "1"})
        return json_response({"status": "ready", **several})

    @app.get("/metrics")
    async def metrics_text(request: Request) -> Response:
        page, kind = metrics(request.headers.get("accept", ""))
        return Response(page, headers={"content-type": kind})

    @app.exception_handler(MoonpoolError)
    async def ours(request: Request, error: MoonpoolError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def theirs(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        message = f"{request.method} {path[:200]}: {str(error.detail).lower()}; see /openapi.json for what is offered"
        refused = refusal_of(path)
        code = "no_such_route" if refused is None else CODE
        value = {"message": refused or message, "type": "invalid_request_error", "param": None, "code": code}
        return json_response({"error": value}, status=error.status_code, headers=error.headers)

    for router in routers:
        app.include_router(router)
    return app


def _card(name: str, model: Served, created: int) -> dict[str, Any]:
    """``root``: the model's own name, where ``name`` is an alias of it; ``parent``: the model of the adapter ``name``."""
    adapter = name in model.adapters
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "moonpool",
        "root": name if adapter else model.name,
        "parent": model.name if adapter else None,
        "max_model_len": model.roster.limits().context,
    }


def _missing(models: Models, model: str) -> list[str]:
    if model == ALL:
        roles = [role for one in models.lacking() for role in one.roster.missing()]
    elif model:
        found = models.named(model)
        if found is None:  # which ones are is not for everybody to know, and this route is open to all
            raise UnknownModel(f"model: {model[:100]!r} is not served here; GET /v1/models lists those that are", param="model")
        roles = found.roster.missing()
    else:
        roles = models.missing()
    return [role.value for role in dict.fromkeys(roles)]


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
