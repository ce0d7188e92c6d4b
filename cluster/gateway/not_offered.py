"""What OpenAI's API has and this gateway does not: refused by name, so that a client's user reads why. Pure."""

from __future__ import annotations

CODE = "not_offered"
OFFERED = "POST /v1/chat/completions, POST /v1/completions and GET /v1/models"
_PARTS = {
    "/v1/assistants": "assistants",
    "/v1/audio": "audio",
    "/v1/batches": "batches",
    "/v1/embeddings": "embeddings",
    "/v1/files": "files",
    "/v1/fine_tuning": "fine-tuning",
    "/v1/images": "images",
    "/v1/moderations": "moderations",
    "/v1/realtime": "realtime sessions",
    "/v1/responses": "responses (use chat completions)",
    "/v1/threads": "threads",
    "/v1/uploads": "uploads",
    "/v1/vector_stores": "vector stores",
    "/v1/videos": "videos",
}


def refusal_of(path: str) -> str | None:
    """The message about a route that is of OpenAI's API and not here; None for any other path."""
    part = next((name for name in _PARTS if path == name or path.startswith(f"{name}/")), None)
    return f"{path[:200]}: {_PARTS[part]} are not offered here; this gateway has {OFFERED}" if part is not None else None
