"""The longest sequence an engine serves: what was asked, the model's limit, or what fits."""

from kv8.cache.capacity import longest_sequence, memory_for
from kv8.cache.layout import CacheLayout
from kv8.errors import CapacityError, RequestError
from kv8.geometry import ModelGeometry
from kv8.options import EngineOptions
from kv8.units import format_bytes

MIN_MODEL_LEN = 2


def check_max_model_len(asked: int | None, limit: int) -> None:
    """Refuse a longest sequence that no cache, however large, lets a model of ``limit`` serve.

    Raises:
        RequestError: it is too short for anything, or beyond the model's own limit.
    """
    if asked is not None and not MIN_MODEL_LEN <= asked <= limit:
        raise RequestError(
            f"max_model_len={asked} cannot be served: give at least {MIN_MODEL_LEN} (a token of "
            f"prompt and one of output) and at most {limit}, which this model was made for."
        )


def choose_max_model_len(
    options: EngineOptions, geometry: ModelGeometry, layout: CacheLayout, memory: int
) -> tuple[int, str]:
    """Return the longest sequence served; what is asked is never shortened, but refused."""
    asked, limit = options.max_model_len, geometry.max_position
    longest = longest_sequence(layout, memory // layout.block_bytes)
    check_max_model_len(asked, limit)
    wanted = limit if asked is None else asked
    if longest is None or longest >= wanted:
        return wanted, "the model's limit" if asked is None else "as asked"
    needed = _spell_bytes(memory_for(layout, wanted))
    room = f"kv_cache_memory={format_bytes(memory)} holds {longest:,} tokens of one sequence"
    if longest < MIN_MODEL_LEN:
        raise CapacityError(
            f"{room}, too few to serve anything: a block of {layout.block_size} tokens takes "
            f"{format_bytes(layout.block_bytes)}. Give at least "
            f"{_spell_bytes(memory_for(layout, MIN_MODEL_LEN))}, or a smaller block_size; "
            f"{wanted:,} tokens need {needed}."
        )
    if asked is not None:
        raise CapacityError(
            f"max_model_len={asked} needs {needed} of KV cache, and {room}. Give "
            f"max_model_len={longest} or less, or kv_cache_memory of at least {needed}."
        )
    return longest, f"what fits: {room}; the model's limit of {limit:,} needs {needed}"


def _spell_bytes(num_bytes: int) -> str:
    """Return an amount to be typed back: rounded for reading, and exact."""
    return f"{format_bytes(num_bytes)} ({num_bytes} bytes)"
