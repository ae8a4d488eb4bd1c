"""The clients of serve_load.py: plain sockets, to take little of the machine they share."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from serve_work import Work, make_work

_LONGEST_WAIT = 300.0  # seconds after which a request is taken to hang
_LONGEST_PAUSE = 1.0  # seconds a refused client stays away; the server may ask for more


@dataclass
class Outcomes:
    """What became of all requests."""

    completed: int = 0
    left: int = 0
    refused: dict[int, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    tokens: int = 0
    first_token_seconds: list[float] = field(default_factory=list)


async def run_round(port: int, work: Iterable[Work], clients: int) -> tuple[float, Outcomes]:
    """Have ``clients`` work off a list together; return the seconds and what came of it."""
    outcomes, queue = Outcomes(), iter(work)

    async def client() -> None:
        for one in queue:
            while not await request(port, one, outcomes):
                await asyncio.sleep(0.05)

    begin = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return time.perf_counter() - begin, outcomes


async def run_closed_loop(
    port: int, *, clients: int, seconds: float, leaving: float, seed: int, vocab_size: int
) -> Outcomes:
    """Have ``clients`` send one request after the other, and leave a share of them half-way."""
    outcomes = Outcomes()
    deadline = time.perf_counter() + seconds

    async def client(number: int) -> None:
        draw = random.Random(f"{seed} client {number}")
        while time.perf_counter() < deadline:
            work = make_work(draw, vocab_size)
            leave_after = draw.randint(0, work.max_tokens) if draw.random() < leaving else None
            if not await request(port, work, outcomes, leave_after=leave_after):
                await asyncio.sleep(_LONGEST_PAUSE)

    await asyncio.gather(*(client(number) for number in range(clients)))
    return outcomes


async def request(
    port: int, work: Work, outcomes: Outcomes, *, leave_after: int | None = None
) -> bool:
    """Send one request and read its answer; return whether the server took it.

    ``leave_after`` is the number of events after which the connection is closed without a word.
    """
    body = {
        "prompt": work.prompt,
        "max_tokens": work.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begin = time.perf_counter()
    try:
        async with asyncio.timeout(_LONGEST_WAIT), connection(port, body) as reader:
            status = int((await reader.readline()).split()[1])
            if status != 200:
                outcomes.refused[status] = outcomes.refused.get(status, 0) + 1
                if status not in (429, 503):
                    outcomes.errors.append((await reader.read()).decode(errors="replace")[-500:])
                return status not in (429, 503)
            num_events = 0
            async for event in events(reader):
                if leave_after is not None and num_events >= leave_after:
                    break
                if num_events == 0:
                    outcomes.first_token_seconds.append(time.perf_counter() - begin)
                num_events += 1
                if "error" in event:
                    outcomes.errors.append(str(event["error"]))
                    return True
                if event.get("usage"):
                    outcomes.tokens += event["usage"]["completion_tokens"]
                    outcomes.completed += 1
                    return True
            if leave_after is None:
                outcomes.errors.append("the answer broke off")
            else:
                outcomes.left += 1
    except (OSError, TimeoutError, ValueError, IndexError) as error:
        outcomes.errors.append(f"{type(error).__name__}: {error}")
    return True


@asynccontextmanager
async def connection(port: int, body: dict[str, object]) -> AsyncIterator[asyncio.StreamReader]:
    """Send ``body`` and give what comes back; the socket is closed however it is left."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        content = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: kv8\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        await writer.drain()
        yield reader
    finally:
        writer.transport.abort()


async def events(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Give the events of a stream; the framing of its chunks needs no attention for that."""
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            yield json.loads(line[len(b"data: ") :])
