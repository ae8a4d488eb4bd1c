"""What callers may give as a prompt, turned into text and token numbers, or refused by name."""

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any, TypeAlias

from kv8.errors import RequestError

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
Message: TypeAlias = Mapping[str, Any]
Conversation: TypeAlias = Sequence[Message]
TokenizedPrompt: TypeAlias = tuple[str | None, list[int]]

_KEYS = ("prompt", "prompt_token_ids")


def prompts_of(prompts: Any, tokenizer: Any) -> list[TokenizedPrompt]:
    """Return text (if any) and token numbers of each prompt.

    Args:
        prompts: one `Prompt` or a list of them; a flat list of numbers is one prompt.
        tokenizer: the model's; it adds the special tokens it was trained with.

    Raises:
        RequestError: something among them is no prompt, or an empty one.
    """
    if isinstance(prompts, str | Mapping) or _are_numbers(prompts):
        prompts = [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise RequestError(f"prompts must be a prompt or a list of them, got {prompts!r:.80}.")
    return [_tokenized(prompt, i, tokenizer) for i, prompt in enumerate(prompts)]


def conversations(
    messages: Any,
    tokenizer: Any,
    *,
    template: str | None = None,
    add_generation_prompt: bool = True,
    template_options: Mapping[str, Any] | None = None,
) -> list[TokenizedPrompt]:
    """Return the templated text and token numbers of each conversation.

    Args:
        messages: one `Conversation` or a list of them.
        tokenizer: the model's.
        template: a Jinja template in place of the tokenizer's.
        add_generation_prompt: whether to add what begins an answer.
        template_options: what else the template is told, such as tools.

    Raises:
        RequestError: there is no template, the messages are none, or the template refuses them.
    """
    if not messages or not isinstance(messages, Sequence) or isinstance(messages, str):
        raise RequestError("messages must be a list of {'role': ..., 'content': ...}.")
    many = [messages] if isinstance(messages[0], Mapping) else messages
    if template is None and not getattr(tokenizer, "chat_template", None):
        raise RequestError(
            "The model's tokenizer has no chat template. Give one with chat_template=, or use "
            "generate with a prompt written out."
        )
    results: list[TokenizedPrompt] = []
    for number, conversation in enumerate(many):
        plain = _plain_messages(conversation)
        try:
            text = tokenizer.apply_chat_template(
                plain,
                tokenize=False,
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                **(template_options or {}),
            )
        except Exception as error:
            raise RequestError(f"The chat template refuses the messages: {error}.") from error
        # The template has written the special tokens itself.
        ids = _encode(tokenizer, text, f"Conversation {number}", special=False)
        results.append((text, ids))
    return results


def _tokenized(prompt: Any, number: int, tokenizer: Any) -> TokenizedPrompt:
    if isinstance(prompt, Mapping):
        given = [key for key in _KEYS if key in prompt]
        unknown = [str(key) for key in prompt if key not in _KEYS]
        if unknown or not given:
            found = ", ".join(map(str, prompt)) or "none"
            raise RequestError(
                f"Prompt {number} has the keys {found}; allowed are {' and '.join(_KEYS)}."
            )
        text = prompt.get("prompt")
        if "prompt_token_ids" in prompt:
            return text, _numbers(prompt["prompt_token_ids"], number)
        prompt = text
    if isinstance(prompt, str):
        if not prompt:
            raise RequestError(f"Prompt {number} is empty: there is nothing to go on from.")
        return prompt, _encode(tokenizer, prompt, f"Prompt {number}", special=True)
    return None, _numbers(prompt, number)


def _numbers(token_ids: Any, number: int) -> list[int]:
    if isinstance(token_ids, str | Mapping) or not _is_listed(token_ids):
        raise RequestError(
            f"Prompt {number} must be text, a list of token numbers, or a dictionary with prompt "
            f"or prompt_token_ids, got {token_ids!r:.80}."
        )
    try:
        if any(isinstance(token, bool) for token in token_ids):
            raise TypeError
        numbers = [index(token) for token in token_ids]
    except TypeError:
        raise RequestError(
            f"Prompt {number} holds something that is no token number: {token_ids!r:.80}."
        ) from None
    if not numbers:
        raise RequestError(f"Prompt {number} is empty: there is nothing to go on from.")
    return numbers


def _encode(tokenizer: Any, text: str, name: str, *, special: bool) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} holds bytes that are no text in UTF-8: {error}.") from error
    # verbose=False: a long prompt is the engine's to refuse, with lengths, not the tokenizer's.
    ids: list[int] = tokenizer.encode(text, add_special_tokens=special, verbose=False)
    return ids


def _plain_messages(conversation: Any) -> list[dict[str, Any]]:
    """Return the messages as templates read them: each content is text, or `None`."""
    if not _is_listed(conversation) or not conversation:
        raise RequestError("A conversation must be a list of at least one message.")
    messages = []
    for message in conversation:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise RequestError(
                f"A message must be a dictionary with role and content, got {message!r:.80}."
            )
        messages.append({**message, "content": _plain_content(message)})
    return messages


def _plain_content(message: Message) -> str | None:
    """Return a message's text. A template would write anything else as Python spells it."""
    content = message["content"]
    if isinstance(content, str) or (content is None and "tool_calls" in message):
        return content
    parts = content if isinstance(content, list | tuple) else [content]
    for part in parts:
        text = isinstance(part, Mapping) and part.get("type") == "text" and part.get("text")
        if not isinstance(text, str):
            raise RequestError(
                f"A message's content must be text, or a list of "
                f"{{'type': 'text', 'text': ...}}; kv8 reads nothing else. Got {part!r:.80}."
            )
    return "\n".join(part["text"] for part in parts)  # as vLLM joins them


def _is_listed(value: Any) -> bool:
    text = isinstance(value, str | bytes | bytearray)
    return hasattr(value, "__len__") and hasattr(value, "__iter__") and not text


def _are_numbers(value: Any) -> bool:
    """Whether ``value`` is one prompt in token numbers: a flat list that begins with a number."""
    if not _is_listed(value) or isinstance(value, Mapping) or len(value) == 0:
        return False
    return hasattr(next(iter(value)), "__index__")
