"""Backend tests run on every backend."""

from tests.attention_backends import each_backend

__all__ = ["each_backend"]
