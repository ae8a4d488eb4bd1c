"""Shapes that take what they know and nothing else."""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kv8.server.protocol.text import require_text

_Item = TypeVar("_Item")

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
# A list in which the first wrong item is told: a body has room for a million, and a finding of
# each would keep everybody else waiting for a minute.
ListOf = Annotated[list[_Item], Field(fail_fast=True)]


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
