"""Reads tool calls out of an answer's text as it grows."""

import enum
import json
import secrets
import string
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from kv8.server.protocol.tools import FunctionCall, ToolCallDelta
from kv8.server.tool_format import ToolFormat

_ID_LETTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9  # what the strictest chat templates take back


@dataclass(frozen=True)
class MessageDelta:
    """What a message gained: text, or calls, each of them whole."""

    content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class _State(enum.Enum):
    TEXT = enum.auto()
    CALL = enum.auto()  # a marker was seen
    AFTER = enum.auto()  # a call was read


class ToolReader:
    """One answer. What looks like a call and turns out to be none stays in the text.

    Args:
        style: how the model calls.
        names: the functions it may call.

    Attributes:
        called: whether there was a call.
    """

    def __init__(self, style: ToolFormat, names: Collection[str]) -> None:
        self.called = False
        self._style = style
        self._names = names
        # Models are not exact about blanks, so nothing depends on them.
        self._marker, *self._opening = style.begin.split() or [""]
        self._end = style.end.strip()
        between = style.between or ""
        listed = not self._marker or self._marker not in between
        self._separator = between.strip() if listed else ""
        self._state = _State.TEXT
        self._unread = ""
        self._announced = ""  # what made a call of what follows
        self._scan = _ObjectScan()
        self._blank_so_far = True  # nothing but blanks since the start or the last call
        self._num_calls = 0

    def push(self, text: str) -> list[MessageDelta]:
        """Take more of the answer's text; return what can be told of it."""
        self._unread += text
        steps = {_State.TEXT: self._text, _State.CALL: self._call, _State.AFTER: self._after}
        deltas: list[MessageDelta] = []
        while (delta := steps[self._state]()) is not None:
            deltas.append(delta)
        return [delta for delta in deltas if delta.content or delta.tool_calls]

    def finish(self) -> list[MessageDelta]:
        """Return what was kept back; call once, after the last text."""
        text = "" if self._state is _State.AFTER else self._announced + self._unread
        self._announced = self._unread = ""
        if self._state is _State.TEXT and self._blank_so_far and not text.strip():
            return []
        return [MessageDelta(text)] if text else []

    def _text(self) -> MessageDelta | None:
        """Pass on text up to where a call may begin; `None` if nothing is sure yet."""
        if not self._marker:
            first = self._blank_so_far and self._num_calls == 0
            if first and self._unread.lstrip().startswith("{"):
                self._begin_call("")
                return MessageDelta()
            return self._pass_on(len(self._unread))
        start = self._unread.find(self._marker)
        if start < 0:
            return self._pass_on(len(self._unread) - self._num_open())
        content = self._unread[:start]
        self._unread = self._unread[start + len(self._marker) :]
        self._begin_call(self._marker)
        return MessageDelta("" if self._blank_so_far and not content.strip() else content)

    def _call(self) -> MessageDelta | None:
        """Read the object of a call; `None` if its end has not come."""
        start = self._skip_opening()
        if start is None:
            return None
        if self._unread[start] != "{":
            return self._give_up(0)
        stop = self._scan.end_of(self._unread, start)
        if stop is None:
            return None
        call = self._parse(self._unread[start:stop])
        if call is None:
            return self._give_up(stop)
        self.called = True
        self._num_calls += 1
        self._unread = self._unread[stop:]
        self._announced = ""
        self._state = _State.AFTER
        return MessageDelta(tool_calls=(call,))

    def _after(self) -> MessageDelta | None:
        """Skip what closes a call, or see that another follows."""
        rest = self._unread.lstrip()
        if self._separator and rest.startswith(self._separator):
            self._unread = rest[len(self._separator) :]
            self._begin_call(self._separator)
            return MessageDelta()
        if self._end and rest.startswith(self._end):
            self._unread = rest[len(self._end) :]
        elif any(mark.startswith(rest) for mark in (self._end, self._separator) if mark):
            return None
        self._blank_so_far = True
        self._state = _State.TEXT
        return MessageDelta()

    def _begin_call(self, announced: str) -> None:
        self._announced = announced
        self._scan = _ObjectScan()
        self._state = _State.CALL

    def _give_up(self, stop: int) -> MessageDelta:
        """Turn what was announced as a call, and ``stop`` characters, back into text."""
        content = self._announced + self._unread[:stop]
        self._unread = self._unread[stop:]
        self._announced = ""
        self._blank_so_far = False
        self._state = _State.TEXT
        return MessageDelta(content)

    def _pass_on(self, length: int) -> MessageDelta | None:
        content = self._unread[:length]
        if not content or (self._blank_so_far and not content.strip()):
            return None  # blanks around calls are no content
        self._unread = self._unread[length:]
        self._blank_so_far = False
        return MessageDelta(content)

    def _num_open(self) -> int:
        """Return how long an end of the text may be the beginning of a marker."""
        longest = min(len(self._marker) - 1, len(self._unread))
        lengths = range(longest, 0, -1)
        return next((n for n in lengths if self._marker.startswith(self._unread[-n:])), 0)

    def _skip_opening(self) -> int | None:
        """Return where the object should begin; `None` if that has not come."""
        start = 0
        for piece in (*self._opening, ""):
            while start < len(self._unread) and self._unread[start].isspace():
                start += 1
            rest = self._unread[start:]
            if not rest or (len(rest) < len(piece) and piece.startswith(rest)):
                return None
            start += len(piece) if piece and rest.startswith(piece) else 0
        return start

    def _parse(self, text: str) -> ToolCallDelta | None:
        """Return the call that a JSON object describes, `None` if it is none."""
        try:
            value = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            return None
        name = value.get(self._style.name_key)
        arguments = value.get(self._style.arguments_key, {})
        known = isinstance(name, str) and name in self._names
        if not known or not isinstance(arguments, dict):
            return None
        function = FunctionCall(name=name, arguments=_written(arguments))
        call_id = "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))
        return ToolCallDelta(id=call_id, function=function, index=self._num_calls)


def _written(arguments: dict[str, Any]) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which only escapes can say
        return json.dumps(arguments)
    return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


class _ObjectScan:
    """Finds the end of a JSON object in a text that grows, looking at each character once."""

    def __init__(self) -> None:
        self._position = 0
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def end_of(self, text: str, start: int) -> int | None:
        """Return where the object that begins at ``start`` ends; `None` if it goes on.

        ``text`` is what it was before, and more.
        """
        self._position = max(self._position, start)
        while self._position < len(text):
            letter = text[self._position]
            self._position += 1
            if self._in_string:
                self._in_string = self._escaped or letter != '"'
                self._escaped = letter == "\\" and not self._escaped
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return self._position
        return None
