"""Settings of the server: checked where they are made, with messages that name them."""

import pytest

from kv8.errors import RequestError
from kv8.server.settings import ServerSettings


@pytest.mark.parametrize(
    "values",
    [
        {"port": -1},
        {"port": 65_536},
        {"port": True},
        {"port": "80"},
        {"host": ""},
        {"max_queued": -1},
        {"max_queued": 1.5},
        {"max_body_size": "much"},
        {"max_body_size": 0},
        {"api_key": [""]},
        {"served_model_name": ["a", ""]},
        {"api_key": ["good", " padded"]},
        {"api_key": ["two\nlines"]},
        {"api_key": ["\udcff"]},
        {"served_model_name": ["\udcff"]},
        {"allowed_origins": [7]},
        {"allowed_origins": ["example.org"]},
        {"allowed_origins": ["https://example.org/path"]},
        {"drain_timeout": -1.0},
        {"drain_timeout": float("nan")},
    ],
)
def test_values_that_cannot_be_are_refused_by_name(values) -> None:
    with pytest.raises(RequestError, match=next(iter(values))):
        ServerSettings(**values)


def test_what_is_given_is_kept() -> None:
    settings = ServerSettings(
        max_body_size="2MiB",
        api_key="one",
        served_model_name=["a", "b"],
        allowed_origins=["https://example.org", "http://localhost:3000", "*"],
    )
    assert settings.max_body_size == 2 * 2**20
    assert settings.api_key == ("one",)
    assert settings.served_model_name == ("a", "b")
    assert settings.allowed_origins == ("https://example.org", "http://localhost:3000", "*")
    assert ServerSettings(api_key=["zweiter Schlüssel"]).api_key == ("zweiter Schlüssel",)
