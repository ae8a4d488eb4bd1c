"""What form an answer is to have: OpenAI's ``response_format``, vLLM's ``structured_outputs``."""

from typing import Annotated, Any, Final, Literal

from pydantic import Field

from kv8.server.protocol.strict import ListOf, Strict

# To compile a form takes about as long as a second with this much of it, and ten times as much may
# take minutes.
MOST_CHARACTERS: Final = 131_072
MOST_CHOICES_OF_TEXT: Final = 10_000
FormText = Annotated[str, Field(max_length=MOST_CHARACTERS)]


class TextFormat(Strict):
    """No form at all."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """A JSON object, whatever is in it."""

    type: Literal["json_object"]


class JsonSchema(Strict):
    """A schema and what it is called; name and description are for people."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    schema_: dict[str, Any] = Field(
        default_factory=lambda: {"type": "object"}, alias="schema", description="The JSON schema."
    )
    strict: bool | None = Field(
        None, description="Answers always fit the schema, whatever is said here."
    )


class JsonSchemaFormat(Strict):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class StructuredOutputs(Strict):
    """The form of an answer, exactly one; see `kv8.structured_outputs`."""

    json_: dict[str, Any] | FormText | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: FormText | None = None
    choice: Annotated[ListOf[str], Field(max_length=MOST_CHOICES_OF_TEXT)] | None = None
    grammar: FormText | None = None
