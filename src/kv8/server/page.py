"""The page at ``/``: static files that come with the package and read ``/v1/kv_cache``.

No build step, nothing from another host: the policy below has browsers enforce that.
"""

import hashlib
from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import APIRouter, Request, Response

_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # asked about each time, so that an upgrade shows at once
}


def router() -> APIRouter:
    """Return the routes of the page and its files."""
    routes = APIRouter(include_in_schema=False)
    for name, body in _read_files().items():
        path = "/" if name == "index.html" else f"/static/{name}"
        routes.add_api_route(path, _serve(name, body), methods=["GET", "HEAD"])
    return routes


def _read_files() -> dict[str, bytes]:
    folder = files("kv8.server") / "static"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def _serve(name: str, body: bytes) -> Callable[[Request], Awaitable[Response]]:
    tag = f'"{hashlib.blake2b(body, digest_size=8).hexdigest()}"'
    headers = {**_HEADERS, "ETag": tag}
    media_type = _MEDIA_TYPES[name[name.rindex(".") :]]

    async def serve(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=media_type, headers=headers)

    return serve
