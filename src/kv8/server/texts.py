"""The server's own tokenizer, on a thread of its own: text to tokens and back.

Tokenizers are not made for two threads at once, and the engine's is busy. A long prompt takes a
while to tokenize; meanwhile the event loop goes on.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

_Result = TypeVar("_Result")


class Texts:
    """A tokenizer that one thread works with.

    Args:
        tokenizer: nobody else may use it.
        chat_template: a Jinja template in place of the tokenizer's.
    """

    def __init__(self, tokenizer: Any, *, chat_template: str | None = None) -> None:
        self.chat_template = chat_template
        self._tokenizer = tokenizer
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv8-texts")

    async def use(self, function: Callable[[Any], _Result]) -> _Result:
        """Return what ``function`` returns for the tokenizer, called on the thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, function, self._tokenizer)

    def close(self) -> None:
        """End the thread."""
        self._executor.shutdown(wait=False, cancel_futures=True)
