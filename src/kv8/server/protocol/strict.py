"""Shapes that take what they know and nothing else."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kv8.server.protocol.text import require_text

TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class Strict(BaseModel):
    """A shape that takes no other fields, and no text where a number belongs."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Body(Strict):
    """The outermost shape of a request."""

    @model_validator(mode="before")
    @classmethod
    def _check_text(cls, body: Any) -> Any:
        require_text(body)
        return body
