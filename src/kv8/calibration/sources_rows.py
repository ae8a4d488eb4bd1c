"""One record of calibration data, a text or a conversation, to the tokens it becomes."""

from collections.abc import Mapping, Sequence
from typing import Any

from kv8.calibration.packing import Joints
from kv8.engine.prompts import conversations
from kv8.errors import RequestError

FIELDS = ("messages", "text")


def encode(text: str, tokenizer: Any, where: str) -> list[int]:
    """Return the tokens of ``text``, without any that a prompt begins or ends with.

    Raises:
        RequestError: the text holds half a surrogate pair, which no tokenizer takes.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{where}: holds what is no text in UTF-8 ({error}).") from error
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return ids


def record_tokens(record: Any, tokenizer: Any, joints: Joints, where: str) -> Sequence[int]:
    """Return the tokens of a record: its ``messages`` if it has any, else its ``text``.

    Other fields are not read. An empty text adds nothing.

    Args:
        record: a mapping, from a line of JSON or a dataset's row.
        tokenizer: the model's.
        joints: what goes around a text; a conversation's template writes its own.
        where: the record's place, for messages.

    Raises:
        RequestError: the record is no mapping, has neither field, or one that is not as it should.
    """
    if not isinstance(record, Mapping):
        raise RequestError(f"{where}: {_WANTED}, found {record!r:.60}.")
    if record.get("messages") is not None:
        return _conversation(record["messages"], tokenizer, where)
    text = record.get("text")
    if text is None and "text" in record:
        nulls = '"text" and "messages" are' if "messages" in record else '"text" is'
        raise RequestError(
            f"{where}: {nulls} null; {_WANTED} in it. Mend the record, or leave it out."
        )
    if text is None:
        found = ", ".join(map(str, record)) or "none"
        raise RequestError(f"{where}: {_WANTED}; its fields are {found}.")
    if not isinstance(text, str):
        raise RequestError(f'{where}: "text" must be a string, found {text!r:.60}.')
    return [*joints.begin, *encode(text, tokenizer, where), *joints.end] if text else ()


_WANTED = 'must be an object with "text" or "messages"'


def _conversation(messages: Any, tokenizer: Any, where: str) -> Sequence[int]:
    if not getattr(tokenizer, "chat_template", None):
        raise RequestError(
            f'{where}: holds chat "messages", but the model\'s tokenizer has no chat template. '
            f'Give plain text ("text") for this model.'
        )
    if not isinstance(messages, list) or not all(isinstance(m, Mapping) for m in messages):
        raise RequestError(
            f'{where}: "messages" must be a list of {{"role": ..., "content": ...}}, found '
            f"{messages!r:.60}."
        )
    plain = [_message(each, number, where) for number, each in enumerate(messages, start=1)]
    try:
        [(_, tokens)] = conversations(plain, tokenizer, add_generation_prompt=False)
    except RequestError as error:
        raise RequestError(f"{where}: {error}") from error
    return tokens


def _message(message: Mapping[str, Any], number: int, where: str) -> dict[str, Any]:
    """Return a message as templates read it: nothing is null.

    A message that calls tools has no content, or null, in many data sets, and templates that put
    texts together fail at that. Whatever else is null was not there: tables have every column in
    every row.
    """
    given = {name: value for name, value in message.items() if value is not None}
    if "content" not in given and given.get("tool_calls"):
        given["content"] = ""
    elif "content" not in given and "content" in message:
        raise RequestError(
            f'{where}: the "content" of message {number} is null. It must be text, except in a '
            f'message with "tool_calls". Mend or remove the conversation.'
        )
    return given
