"""``/v1/models``: what is served, under which names."""

from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from kv8.server.state import ServerState


class ModelCard(BaseModel):
    """One name of the model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["kv8"] = "kv8"
    root: str = Field(description="What the server was started with.")
    max_model_len: int = Field(description="Longest sequence in tokens, prompt and output.")
    kv_cache_dtype: str = Field(description="Format of the KV cache; /v1/kv_cache says more.")


class ModelList(BaseModel):
    """All names."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


def router(state: ServerState) -> APIRouter:
    """Return the routes; they answer while the model loads, too."""
    routes = APIRouter()

    @routes.get("/v1/models")
    async def list_models() -> ModelList:
        """List the names the model is served under."""
        return ModelList(data=[_card(state, name) for name in state.model_names])

    @routes.get("/v1/models/{model:path}")
    async def show_model(model: str) -> ModelCard:
        """Show one of them."""
        state.require_model(model)
        return _card(state, model)

    return routes


def _card(state: ServerState, name: str) -> ModelCard:
    config = state.config
    fields: dict[str, Any] = {
        "id": name,
        "created": state.created,
        "root": state.options.model,
        "max_model_len": config.max_model_len,
        "kv_cache_dtype": config.kv_format.name,
    }
    return ModelCard(**fields)
