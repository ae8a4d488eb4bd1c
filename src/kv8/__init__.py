"""kv8: LLM inference with a quantized KV cache that says what it stores, how well, and why.

`LLM`, `calibrate` and `SamplingParams` are imported when they are first asked for, so that
``import kv8`` stays light: neither torch nor transformers is loaded by it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kv8._version import __version__
from kv8._waiting import wait_briefly

if TYPE_CHECKING:
    from kv8.calibration.calibrate import calibrate
    from kv8.llm import LLM
    from kv8.outputs import CompletionOutput, RequestOutput
    from kv8.sampling_params import SamplingParams
    from kv8.structured_outputs import StructuredOutputsParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
    "calibrate",
]

wait_briefly()  # before torch is imported

_HOMES = {
    "LLM": "kv8.llm",
    "CompletionOutput": "kv8.outputs",
    "RequestOutput": "kv8.outputs",
    "SamplingParams": "kv8.sampling_params",
    "StructuredOutputsParams": "kv8.structured_outputs",
    "calibrate": "kv8.calibration.calibrate",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kv8' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
