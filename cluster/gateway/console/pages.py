"""The console's page and its parts, read once from this package; nothing of them comes from elsewhere."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

STATIC = Path(__file__).parent / "static"
INDEX = "index.html"
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

# Scripts, styles and pictures from this gateway only, no inline ones; nothing else may be loaded, framed, or posted to. With
# trusted types a script cannot make markup out of text, whoever wrote the text.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class Page:
    body: bytes
    kind: str
    etag: str


def read_pages(folder: Path = STATIC) -> dict[str, Page]:
    """By file name."""
    pages = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in _KINDS:
            body = path.read_bytes()
            pages[path.name] = Page(body, f"{_KINDS[path.suffix]}; charset=utf-8", f'"{hashlib.sha256(body).hexdigest()[:20]}"')
    return pages
