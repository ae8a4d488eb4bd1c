"""The web application: which routes there are, and what every request passes through first."""

from fastapi import FastAPI

from kv8.server.state import ServerState


def make_app(state: ServerState) -> FastAPI:
    """Return the application that serves ``state``."""
    app = FastAPI(title="kv8")
    return app
