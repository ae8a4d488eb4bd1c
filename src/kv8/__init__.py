"""kv8: LLM inference with a quantized KV cache that says what it stores, how well, and why."""

from kv8._version import __version__

__all__ = ["__version__"]
