"""What the program says of errors that are not its own."""

import pytest

from kv8.cli.app import main


def test_a_file_that_may_not_be_read_is_no_bug_of_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "/models/theirs.safetensors")

    monkeypatch.setattr("kv8.cli.app.normalise", refuse)
    assert main(["plan", "x"]) == 2
    assert capsys.readouterr().err == (
        "kv8: error: /models/theirs.safetensors: permission denied. This user may not read or "
        "write it.\n"
    )
