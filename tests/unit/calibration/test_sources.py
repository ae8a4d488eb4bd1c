"""Calibration data from every source, and what is said where there is none."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engines import start_engine
from tests.text_tokenizers import byte_level
from tests.tiny_models import BOS, EOS, VOCAB, save_tokenizer
from transformers import AutoTokenizer

from kv8.calibration import sources_datasets, sources_files
from kv8.calibration.packing import Joints
from kv8.calibration.sources import Samples, load_samples
from kv8.calibration.sources_made import ordinary_tokens, text_writer
from kv8.errors import EngineError, RequestError, SourceError

TEXT = "The quick brown fox jumps over the lazy dog. " * 4


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The byte-level tokenizer: token ``4 + rank`` a byte, begin in front, end token 2."""
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


def _load(source: Any, tokenizer: Any, **changes: Any) -> Samples:
    options = {"samples": 4, "max_length": 64, "seed": 0} | changes
    return load_samples(source, tokenizer, **options)


def _write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def _stream(samples: Samples) -> list[int]:
    """The samples one after another, without the begin tokens that cuts brought in."""
    return [token for s in samples.sequences for token in s if token != BOS]


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_joints_are_what_the_tokenizer_puts_around_a_text(tokenizer):
    assert Joints.of(tokenizer) == Joints((BOS,), (EOS,))
    bare = byte_level()  # adds nothing of its own, but has an end token
    assert Joints.of(bare) == Joints((), (bare.eos_token_id,))


def test_a_text_file_is_one_text(tokenizer, tmp_path):
    path = _write(tmp_path / "a.txt", TEXT)
    found = _load(path, tokenizer, samples=8)
    assert _stream(found) == [*_ids(tokenizer, TEXT), EOS]
    assert found.tokens_asked == 8 * 64
    assert found.tokens_used == sum(map(len, found.sequences)) == len(TEXT) + 1 + 4
    assert found.description == str(path)
    assert all(sequence[0] == BOS for sequence in found.sequences)


def test_a_text_file_is_read_in_pieces_and_no_further_than_needed(tokenizer, tmp_path, monkeypatch):
    text = "Größe über alles 한국어 words  and\nlines " * 40
    path = _write(tmp_path / "a.TXT", "\ufeff" + text)  # a byte order mark is no text
    whole = _load(path, tokenizer, samples=50)
    monkeypatch.setattr(sources_files, "_PIECE_BYTES", 7)  # in the middle of characters
    assert _load(path, tokenizer, samples=50) == whole
    assert _stream(whole) == [*_ids(tokenizer, text), EOS]

    path.write_bytes(path.read_bytes() + b"\xff")
    assert _load(path, tokenizer, samples=4).tokens_used == 4 * 64 - 1


def test_a_line_without_any_space_is_read_too(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(sources_files, "_PIECE_BYTES", 5)
    path = _write(tmp_path / "a.txt", "x" * 100)
    assert _stream(_load(path, tokenizer)) == [*_ids(tokenizer, "x" * 100), EOS]


def test_lines_of_text_and_of_chat(tokenizer, tmp_path):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    lines = [{"text": TEXT, "id": 1}, {"text": ""}, {"messages": chat}, {"text": "end"}]
    path = _write(tmp_path / "a.jsonl", "\n\n".join(map(json.dumps, lines)) + "\r\n")
    templated = "[user] hi\n[assistant] hello\n"  # the template's begin token comes first
    assert _stream(_load(path, tokenizer)) == [
        *(*_ids(tokenizer, TEXT), EOS),
        *_ids(tokenizer, templated),
        *(*_ids(tokenizer, "end"), EOS),
    ]


def test_samples_differ_when_and_only_when_the_digest_does(tokenizer, tmp_path):
    one = _load(_write(tmp_path / "a.txt", TEXT), tokenizer)
    assert _load(_write(tmp_path / "b.txt", TEXT), tokenizer).digest == one.digest
    assert _load(_write(tmp_path / "c.txt", TEXT + "."), tokenizer).digest != one.digest
    assert _load(tmp_path / "a.txt", tokenizer, max_length=32).digest != one.digest


def _bad_line(text: str | bytes) -> bytes:
    good = json.dumps({"text": TEXT}).encode() + b"\n"
    return good * 6 + (text.encode() if isinstance(text, str) else text) + b"\n" + good


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "a.txt is empty"),
        ("a.jsonl", b"", "a.jsonl is empty"),
        ("a.txt", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "a.txt is not text: it holds zero bytes"),
        ("a.jsonl", b"\x1f\x8b\0\0", "a.jsonl is not text: it holds zero bytes"),
        ("a.txt", TEXT.encode("utf-16"), "binary files and UTF-16.* Save it as text in UTF-8"),
        ("a.txt", b"caf\xe9 is Latin-1", "not text in UTF-8: invalid continuation byte at byte 3"),
        ("a.txt", b"cut off \xc3", "not text in UTF-8: unexpected end of data at byte 8"),
        ("a.txt", b"too short", "a.txt holds 11 tokens in all.* less than one block of 16"),
        ("a.jsonl", b"\n \n", "a.jsonl holds 0 tokens in all"),
        ("a.jsonl", b'{"text": "ab"}\n' * 3, "holds 12 tokens in all"),
        ("a.jsonl", _bad_line('{"text": "cut'), r"line 7: is not JSON \(Unterminated.* column 10"),
        ("a.jsonl", _bad_line(b'{"text": "\xff"}'), r"line 7: is not text in UTF-8 .*at byte 10"),
        ("a.jsonl", _bad_line("[" * 100_000), "line 7: is nested too deeply|line 7: is not JSON"),
        ("a.jsonl", _bad_line(f'{{"text": {"1" * 5000}}}'), r"line 7: cannot be read \(Exceeds"),
        ("a.jsonl", _bad_line('{"text": null}'), 'line 7: "text" is null; must be an object'),
        (
            "a.jsonl",
            _bad_line('{"text": null, "messages": null}'),
            'line 7: "text" and "messages" are null',
        ),
        ("a.jsonl", _bad_line('{"text": "\t"}'), "(Invalid control character at column 11)"),
        ("a.jsonl", _bad_line('"text"'), 'line 7: must be an object with "text" or "messages"'),
        ("a.jsonl", _bad_line('{"prompt": "a"}'), "line 7: .*; its fields are prompt"),
        ("a.jsonl", _bad_line("{}"), "line 7: .*; its fields are none"),
        ("a.jsonl", _bad_line('{"text": 7}'), 'line 7: "text" must be a string, found 7'),
        ("a.jsonl", _bad_line('{"text": "\\ud800"}'), "line 7: holds what is no text in UTF-8"),
        ("a.jsonl", _bad_line('{"messages": "hi"}'), 'line 7: "messages" must be a list of'),
        ("a.jsonl", _bad_line('{"messages": []}'), "line 7: messages must be a list"),
        ("a.jsonl", _bad_line('{"messages": [{"role": "user"}]}'), "line 7: A message must be"),
        ("a.csv", b"text\nabc\n", r"name ends in .csv, not in .txt or .jsonl\. Give a .txt"),
        ("README", b"abc", "its name ends in nothing known"),
    ],
)
def test_bad_files_are_refused_by_name_and_place(name, content, message, tokenizer, tmp_path):
    path = _write(tmp_path / name, content)
    with pytest.raises(RequestError, match=message):
        _load(path, tokenizer, samples=512)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere.txt", "nowhere.txt does not exist. Give a .txt file"),
        ("data/nowhere.jsonl", "does not exist"),
        ("", "source of the calibration data is missing. Give a .txt"),
        ("radnom", "'radnom' is no local path.* Did you mean random?"),
        ("/nowhere/at/all", "is no local path"),
    ],
)
def test_a_source_that_is_not_there(source, message, tokenizer):
    with pytest.raises(RequestError, match=message):
        _load(source, tokenizer)


def test_a_device_is_no_text(tokenizer, tmp_path):
    (tmp_path / "a.txt").symlink_to("/dev/zero")
    with pytest.raises(RequestError, match="is not a regular file"):
        _load(tmp_path / "a.txt", tokenizer)


def test_chat_needs_a_template(tmp_path):
    path = _write(tmp_path / "a.jsonl", '{"messages": [{"role": "user", "content": "hi"}]}')
    with pytest.raises(RequestError, match=r"line 1: .*no chat template. Give plain text"):
        _load(path, byte_level())


def test_random_tokens_are_seeded_and_ordinary(tokenizer):
    found = _load("random", tokenizer)
    assert [len(sequence) for sequence in found.sequences] == [64] * 4
    assert found.tokens_used == found.tokens_asked == 4 * 64
    assert all(sequence[0] == BOS for sequence in found.sequences)
    drawn = [token for sequence in found.sequences for token in sequence[1:]]
    assert set(drawn) <= set(range(4, VOCAB))
    assert len(set(drawn)) > 100  # of 256, in 252 draws
    assert _load("random", tokenizer) == found
    assert _load("random", tokenizer, seed=1).digest != found.digest
    assert found.description == "random tokens, seed 0"


def test_added_special_tokens_are_not_drawn():
    tokenizer = byte_level()
    special = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    assert set(ordinary_tokens(tokenizer)) == set(range(len(tokenizer))) - special


def test_a_model_writes_its_own_text(tiny_model, tokenizer):
    engine = start_engine(tiny_model())
    steps: list[int] = []
    write = text_writer(engine, seed=5, on_step=steps.append)
    found = _load("self", tokenizer, samples=3, max_length=40, seed=5, write_text=write)
    assert [len(sequence) for sequence in found.sequences] == [40] * 3  # the end token is no end
    assert sum(steps) == 3 * 40
    assert all(sequence[0] == BOS for sequence in found.sequences)
    assert len(set(found.sequences)) == 3
    assert not engine.has_unfinished

    again = text_writer(engine, seed=5)(3, 40)
    assert tuple(map(tuple, again)) == found.sequences
    assert text_writer(engine, seed=6)(3, 40) != again
    assert found.description == "text the model wrote itself, seed 5"


def test_it_goes_on_after_texts_it_wrote_before(tiny_model):
    """Groups do not depend on one another, so the rest is what it would have been."""
    groups: list[list[list[int]]] = []
    writer = text_writer(
        start_engine(tiny_model()), seed=5, on_texts=lambda texts: groups.append(list(texts))
    )
    whole = writer(10, 40)
    assert [len(texts) for texts in groups] == [4, 8, 10]
    assert groups[-1] == whole
    steps: list[int] = []
    rest = text_writer(start_engine(tiny_model()), seed=5, on_step=steps.append, written=groups[0])
    assert rest(10, 40) == whole
    assert sum(steps) == 6 * 40
    nothing = text_writer(start_engine(tiny_model()), seed=5, on_step=pytest.fail, written=whole)
    assert nothing(10, 40) == whole


def test_an_interrupt_leaves_no_request_behind(tiny_model):
    engine = start_engine(tiny_model())

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        text_writer(engine, seed=0, on_step=interrupt)(2, 40)
    assert not engine.has_unfinished


def test_a_message_that_calls_tools_needs_no_content(tokenizer, tmp_path):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ':' + m.content }}"
        "{% for call in m.tool_calls or [] %}{{ call.name }}{% endfor %}{% endfor %}"
    )
    call = {"role": "assistant", "tool_calls": [{"name": "look"}]}
    user = {"role": "user", "content": "Where is the lamp?", "tool_calls": None}
    try:
        for number, message in enumerate((call, {**call, "content": None})):
            line = json.dumps({"messages": [user, message]})
            found = _load(_write(tmp_path / f"{number}.jsonl", line), tokenizer, samples=1)
            assert _stream(found) == _ids(tokenizer, "user:Where is the lamp?assistant:look")
        line = json.dumps({"messages": [user, {"role": "assistant", "content": None}]})
        with pytest.raises(RequestError, match=r'line 1: the "content" of message 2 is null'):
            _load(_write(tmp_path / "x.jsonl", line), tokenizer)
    finally:
        tokenizer.chat_template = None


def test_self_needs_somebody_to_write(tokenizer):
    with pytest.raises(RequestError, match="needs a model that can write"):
        _load("self", tokenizer)
    with pytest.raises(EngineError, match="write 4 texts of at most 64 tokens; it wrote 1"):
        _load("self", tokenizer, write_text=lambda num, length: [[1] * 65])


def test_a_dataset_without_the_library_names_the_extra(tokenizer, tmp_path, monkeypatch):
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(sources_datasets, "import_module", missing)
    _write(tmp_path / "a.jsonl", json.dumps({"text": TEXT}))
    for source in (tmp_path, "org/name", "org/name:config:train"):
        with pytest.raises(RequestError, match=r"pip install 'kv8\[datasets\]'.*on random, or on"):
            _load(source, tokenizer)


def test_a_folder_without_data_is_refused_before_any_library(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(sources_datasets, "import_module", lambda name: 1 / 0)
    for name in ("notes.md", "dataset_info.json"):
        _write(tmp_path / name, "{}")
    with pytest.raises(
        RequestError, match=r"is a folder without data: no file in it ends in .jsonl"
    ):
        _load(tmp_path, tokenizer)


@pytest.fixture
def datasets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """The real library, with its cache apart."""
    library = pytest.importorskip("datasets", reason="the extra kv8[datasets] is not installed")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(library.config, "HF_HUB_OFFLINE", True)
    return library


ROWS = [{"text": TEXT}, {"text": "end"}]


def test_a_folder_of_data_files(datasets, tokenizer, tmp_path):
    lines = "\n".join(map(json.dumps, ROWS))
    _write(tmp_path / "a.jsonl", lines)
    (tmp_path / "folder").mkdir()
    _write(tmp_path / "folder" / "rows.jsonl", lines)
    found = _load(tmp_path / "folder", tokenizer)
    assert found.sequences == _load(tmp_path / "a.jsonl", tokenizer).sequences
    assert found.description == f"dataset in {tmp_path / 'folder'}"


@pytest.mark.parametrize("splits", [None, ["train", "test"], ["test"]])
def test_a_folder_that_was_saved_to_disk(splits, datasets, tokenizer, tmp_path):
    rows = datasets.Dataset.from_list(ROWS)
    other = datasets.Dataset.from_list([{"text": "never read" * 30}])
    saved = rows
    if splits:
        saved = datasets.DatasetDict(dict.fromkeys(splits, other) | {splits[0]: rows})
    saved.save_to_disk(tmp_path / "saved")
    expected = [*(*_ids(tokenizer, TEXT), EOS), *(*_ids(tokenizer, "end"), EOS)]
    assert _stream(_load(tmp_path / "saved", tokenizer)) == expected


def test_a_split_of_a_folder_is_named_behind_it(datasets, tokenizer, tmp_path, monkeypatch):
    rows = [datasets.Dataset.from_list([row]) for row in ({"text": "one"}, {"text": TEXT})]
    datasets.DatasetDict({"one": rows[0], "two": rows[1]}).save_to_disk(tmp_path / "saved")
    expected = _stream(_load(_write(tmp_path / "a.txt", TEXT), tokenizer))
    assert _stream(_load(f"{tmp_path / 'saved'}:two", tokenizer)) == expected
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    monkeypatch.chdir(tmp_path / "files")
    assert _stream(_load(".", tokenizer)) == expected


def test_a_dataset_s_faults_are_named(datasets, tokenizer, tmp_path):
    def save(name: str, rows: Any) -> Path:
        rows.save_to_disk(tmp_path / name)
        return tmp_path / name

    numbers = datasets.Dataset.from_list([{"number": 1}])
    with pytest.raises(RequestError, match=r"has the columns number; .* messages or text"):
        _load(save("a", numbers), tokenizer)
    two = datasets.DatasetDict({"one": numbers, "two": numbers})
    with pytest.raises(RequestError, match=r"no split 'train'; it has one, two\. .*b:SPLIT"):
        _load(save("b", two), tokenizer)
    with pytest.raises(RequestError, match="no split 'three'; it has one, two"):
        _load(f"{tmp_path / 'b'}:three", tokenizer)
    with pytest.raises(RequestError, match="no splits, so none can be called 'one'"):
        _load(f"{tmp_path / 'a'}:one", tokenizer)
    none = datasets.Dataset.from_dict({"text": []})
    with pytest.raises(RequestError, match="without rows"):
        _load(save("no rows", none), tokenizer)
    empty = datasets.Dataset.from_list([*ROWS, {"text": None}])
    with pytest.raises(RequestError, match='row 3: "text" is null'):
        _load(save("c", empty), tokenizer)
    (tmp_path / "d").mkdir()
    _write(tmp_path / "d" / "broken.jsonl", '{"text": "a"}\n{"text": ')
    with pytest.raises(RequestError, match=r"d cannot be read as a dataset|d holds damaged data"):
        _load(tmp_path / "d", tokenizer)


def test_a_hub_id_without_network(datasets, tokenizer):
    with pytest.raises(SourceError, match=r"org/name:config .*could not be fetched.* on random"):
        _load("org/name:config", tokenizer)


def test_a_hub_id_s_parts_reach_the_library(tokenizer, monkeypatch):
    """The hub cannot be reached from here; this stands in for it, and for a dropped line."""
    calls = []

    class Stream:
        column_names = None  # of a stream they may be unknown

        def __iter__(self) -> Iterator[dict[str, str]]:
            yield {"text": TEXT}
            raise ConnectionError("gone")

    class Library:
        class config:  # noqa: N801 - the library's name
            HF_HUB_OFFLINE = False

        @staticmethod
        def load_dataset(name: str, config: str | None, *, streaming: bool) -> Any:
            calls.append((name, config, streaming))
            return {"test": Stream(), "train": 1 / 1}

    monkeypatch.setattr(sources_datasets, "import_module", lambda name: Library)
    found = _load("org/name:main:test", tokenizer, samples=2, max_length=32)
    assert _stream(found) == _ids(tokenizer, TEXT)[: 2 * 31 - 1]
    assert calls == [("org/name", "main", True)]
    with pytest.raises(SourceError, match="could not be read to its end: gone"):
        _load("org/name::test", tokenizer, samples=20)
    with pytest.raises(RequestError, match="no split 'dev'; it has test, train"):
        _load("org/name::dev", tokenizer)
