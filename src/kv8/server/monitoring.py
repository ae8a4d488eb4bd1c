"""The routes for whoever watches the server: metrics, the cache's document, the page at ``/``."""

from fastapi import APIRouter

from kv8.server import kv_cache, metrics, page
from kv8.server.observation import Observer
from kv8.server.state import ServerState


def router(state: ServerState) -> APIRouter:
    """Return the three; they answer in every state of the server."""
    observer = Observer(state)
    routes = APIRouter()
    routes.include_router(metrics.router(observer))
    routes.include_router(kv_cache.router(observer))
    routes.include_router(page.router())
    return routes
