"""What the server's document says of requests is what they are."""

import pytest

from kv8.server.protocol.chat import ChatCompletionRequest
from kv8.server.protocol.common import GenerationRequest
from kv8.server.protocol.completions import CompletionRequest

SOUND = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}


@pytest.mark.parametrize("request_type", [ChatCompletionRequest, CompletionRequest])
def test_null_is_described_where_it_is_taken(request_type: type[GenerationRequest]) -> None:
    described = request_type.model_json_schema()
    required = {name: SOUND[name] for name in described["required"]}
    left_out = request_type.model_validate(required)
    for name, field in described["properties"].items():
        takes_null = {"type": "null"} in field.get("anyOf", [])
        assert takes_null == (name not in required)
        if takes_null:
            assert request_type.model_validate(required | {name: None}) == left_out
