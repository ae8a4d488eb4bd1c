"""docs/server.md names every field and flag there is, on the right side of honoured and refused."""

import re
from pathlib import Path

import pytest

from kv8.server.protocol.chat import ChatCompletionRequest
from kv8.server.protocol.completions import CompletionRequest
from kv8.server.settings import SETTING_FIELDS

PAGE = (Path(__file__).parents[2] / "docs" / "server.md").read_text()


def section(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def named(text: str) -> set[str]:
    return set(re.findall(r"`([a-z_]+)(?:\.[a-z_]+)?`", text))


@pytest.mark.parametrize(
    ("route", "request_type"),
    [("/v1/chat/completions", ChatCompletionRequest), ("/v1/completions", CompletionRequest)],
)
def test_every_field_is_told(route, request_type) -> None:
    honoured, _, refused = section(f"Fields of `{route}`").partition("\nRefused, unless null")
    rows = {
        name
        for line in honoured.splitlines()
        if line.startswith("| `")
        for name in named(line.split("|")[1])
    }
    fields = {field.alias or name for name, field in request_type.model_fields.items()}
    assert rows == fields
    assert named(refused.split("So is every")[0]) >= request_type.refused.keys()
    assert not named(refused) & fields
    for name, refusal in request_type.refused.items():
        values = re.search(rf"`{name}` \((.*?)\)", refused)
        told = values[1] if values else ""
        assert len(re.findall("`", told)) == 2 * len(refusal.neutral), name


def test_every_flag_is_told() -> None:
    rows = re.findall(r"^\| (`--.*?) \|", section("Flags"), flags=re.MULTILINE)
    told = {name for row in rows for name in re.findall(r"--([a-z-]+)", row)}
    assert told == {name.replace("_", "-") for name in SETTING_FIELDS}
