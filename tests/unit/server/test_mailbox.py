"""A mailbox merges what nobody has taken, ends when every choice has, and hands errors on."""

import asyncio

import pytest

from kv8.errors import EngineError, RequestError
from kv8.outputs import Logprob
from kv8.server.mailbox import ChoiceDelta, Mailbox, PromptReport, Update


def mailbox(num_choices: int = 1) -> Mailbox:
    return Mailbox("1", num_choices, lambda _: None)


def delta(index: int, text: str, *tokens: int, **more) -> ChoiceDelta:
    return ChoiceDelta(index=index, text=text, token_ids=tokens, **more)


def test_what_waits_is_one_piece_a_choice() -> None:
    async def scenario():
        box = mailbox(2)
        box.put(Update((delta(1, "b", 2), delta(0, "a", 1))))
        box.put(Update((delta(1, "c", 3),)))
        assert await box.next() == [delta(0, "a", 1), delta(1, "bc", 2, 3)]
        box.put(Update((delta(0, "!", 4, finish_reason="stop", stop_reason=4),)))
        box.put(Update((delta(1, "?", 5, finish_reason="length"),)))
        assert await box.rest() == [
            delta(0, "!", 4, finish_reason="stop", stop_reason=4),
            delta(1, "?", 5, finish_reason="length"),
        ]
        assert box.ended
        assert await box.next() == []
        assert box.usage.completion_tokens == 5

    asyncio.run(scenario())


def test_logprobs_stay_with_their_tokens() -> None:
    async def scenario():
        box = mailbox()
        first, second = {1: Logprob(-0.5)}, {2: Logprob(-0.25)}
        box.put(Update((delta(0, "", 1, logprobs=(first,)),)))
        box.put(Update((delta(0, "ab", 2, logprobs=(second,)),)))
        (merged,) = await box.next()
        assert merged.logprobs == (first, second)
        assert merged.token_ids == (1, 2)

    asyncio.run(scenario())


def test_a_reader_waits_for_news() -> None:
    async def scenario():
        box = mailbox()
        reader = asyncio.ensure_future(box.next())
        await asyncio.sleep(0)
        assert not reader.done()
        box.accept()  # news, but nothing to read
        await asyncio.sleep(0)
        assert not reader.done()
        box.put(Update((delta(0, "a", 1),)))
        assert await reader == [delta(0, "a", 1)]

    asyncio.run(scenario())


@pytest.mark.parametrize("wait", [Mailbox.accepted, Mailbox.next, Mailbox.rest])
@pytest.mark.parametrize("error", [RequestError("no"), EngineError("gone")])
def test_an_error_reaches_whoever_waits_and_whoever_comes_later(wait, error) -> None:
    async def scenario():
        box = mailbox()
        reader = asyncio.ensure_future(wait(box))
        await asyncio.sleep(0)
        box.fail(error)
        for attempt in (reader, wait(box)):
            with pytest.raises(type(error), match=str(error)):
                await attempt

    asyncio.run(scenario())


def test_prompts_are_counted_once_each() -> None:
    async def scenario():
        box = mailbox(4)
        for index in (1, 0):
            report = PromptReport(index, None, [1, 2, 3], num_cached_tokens=2, logprobs=None)
            box.put(Update((delta(2 * index, "", 9),), report))
            box.put(Update((delta(2 * index + 1, "", 9),)))
        usage = box.usage
        assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (6, 4, 4)

    asyncio.run(scenario())
