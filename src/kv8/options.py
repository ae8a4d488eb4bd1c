"""What the user asked of an engine: intent, which may say "auto". Resolved later, never changed.

Every option's help text stands here once; the command line is a view of these fields.
"""

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from kv8.errors import RequestError
from kv8.formats.lookup import get_format
from kv8.units import parse_bytes

KVCacheDtype = Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "bfloat16", "float16", "float32"]
ModelDtype = Literal["auto", "bfloat16", "float16", "float32"]
QueryDtype = Literal["auto", "native", "fp8"]
MissingScales = Literal["error", "default"]


# Options that are not one of a few words: what each may be, in Python and in words.
_KINDS: tuple[tuple[str, Any, str], ...] = (
    ("model", str, "text"),
    ("tokenizer", str | Path | None, "the name of a folder or hub id"),
    (
        "kv_cache_dtype_skip_layers",
        str | int | Sequence | Set,
        "a list of layer numbers, ranges and layer types",
    ),
    (
        "kv_scales",
        str | Path | Mapping | None,
        'the name of a scales file, or a dictionary like {0: {"k": 0.05, "v": 0.02}}',
    ),
    ("calculate_kv_scales", bool, "True or False"),
    ("calibrate_on", str | Path | None, "the name of a text, a .jsonl file or a data set"),
    ("enable_prefix_caching", bool, "True or False"),
    ("device", str, "text"),
    ("gpu_memory_utilization", int | float | None, "a share between 0 and 1"),
    ("enforce_eager", bool, "True or False"),
    ("seed", int, "a whole number"),
)
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


def _option(default: Any, text: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": text, **more})


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of one engine, checked on their own here and against the model in `kv8.engine`.

    Raises:
        RequestError: an option has a value it cannot have; the message lists those it can.
    """

    model: str = _option(
        "", "Local folder, .gguf file, hub id, or a built-in name: smollm2, gemma3-270m."
    )
    tokenizer: str | Path | None = _option(
        None, "Folder or hub id of the tokenizer, if not the model's."
    )
    dtype: ModelDtype = _option("auto", "Type of the weights; auto is the checkpoint's own.")
    kv_cache_dtype: KVCacheDtype = _option(
        "auto",
        "Format keys and values are stored in. auto: what the checkpoint declares, else the "
        "model's dtype. fp8 is short for fp8_e4m3: one byte a value, largest value 448, divided "
        "by one static scale per tensor or per head (from the checkpoint, --kv-scales, or 1.0). "
        "fp8_e5m2: one byte, wider range, coarser. Runs on any CPU or GPU.",
    )
    kv_cache_dtype_skip_layers: Sequence[str | int] | str | int = _option(
        (),
        "Layers left in the model's dtype: numbers (0 1 -1), ranges (0-3), first:2, last:2, or "
        "layer types of the model (sliding_window, full_attention).",
    )
    kv_scales: str | Path | Mapping[str, Any] | None = _option(
        None, "Scales file (.safetensors) to use in place of the checkpoint's scales."
    )
    calculate_kv_scales: bool = _option(
        False,
        "Before serving, measure k and v scales on one batch of random tokens; they hold from "
        "then on. Replaces the checkpoint's scales.",
    )
    calibrate_on: str | Path | None = _option(
        None,
        "The same on a text of yours: a .txt or .jsonl file, or what else `kv8 calibrate --data` "
        "reads.",
    )
    missing_scales: MissingScales = _option(
        "error",
        "What to do when a checkpoint declares a static FP8 cache but lacks a layer's scale: "
        "error refuses, default goes on with 1.0.",
    )
    query_dtype: QueryDtype = _option(
        "auto",
        "fp8 also quantizes queries and softmax weights (FP8 attention), native never does; auto "
        "does when the checkpoint brings calibrated q scales.",
    )
    device: str = _option(
        "auto", "Where to run: cpu, cuda, cuda:N, or auto: a GPU if torch sees one, else the CPU."
    )
    kv_cache_memory: int | str | None = _option(
        None,
        "Memory for the KV cache, like 2GiB. Default: on a CPU a quarter of what is free, 4GiB at "
        "most; on a GPU what --gpu-memory-utilization leaves.",
    )
    gpu_memory_utilization: float | None = _option(
        None,
        "On a GPU, the share of its memory that is free at the start which the engine takes in "
        "all: weights, working memory of the largest step, and the KV cache, which gets the rest. "
        "Default: 0.9.",
    )
    enforce_eager: bool = _option(
        False, "On a GPU, run every decode step op by op instead of from a captured CUDA graph."
    )
    block_size: int | None = _option(
        None, "Tokens a cache block holds. Default: 16 on a CPU, 64 on a GPU."
    )
    max_model_len: int | None = _option(
        None, "Longest sequence, prompt and output together. Default: the model's own limit."
    )
    max_num_seqs: int = _option(64, "Most sequences run in one step.")
    max_num_batched_tokens: int = _option(
        2048, "Most tokens computed in one step; longer prompts are computed in chunks."
    )
    enable_prefix_caching: bool = _option(True, "Reuse stored keys and values of equal prefixes.")
    attention_backend: str = _option("auto", "Attention implementation, or auto.")
    seed: int = _option(0, "Seed of all requests that bring none of their own.")

    def __post_init__(self) -> None:
        if not self.model:
            raise RequestError("model is missing: give a folder, a .gguf file, a hub id, smollm2.")
        self._check_kinds()
        for name, choices in (
            ("dtype", ModelDtype),
            ("query_dtype", QueryDtype),
            ("missing_scales", MissingScales),
        ):
            value = getattr(self, name)
            if value not in get_args(choices):
                allowed = ", ".join(get_args(choices))
                raise RequestError(f"{name}={value!r} is not known. Allowed: {allowed}.")
        if self.kv_cache_dtype != "auto":
            get_format(str(self.kv_cache_dtype), also=("auto",))
        for name in ("block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise RequestError(f"{name} must be a whole number of at least 1, got {value!r}.")
        if self.kv_cache_memory is not None:
            object.__setattr__(
                self,
                "kv_cache_memory",
                parse_bytes(self.kv_cache_memory, option="kv_cache_memory"),
            )
        self._check_one_source_of_scales()
        self._check_device()
        object.__setattr__(self, "kv_cache_dtype_skip_layers", self.skip_layers)
        for name in ("tokenizer", "kv_scales", "calibrate_on"):
            value = getattr(self, name)
            if isinstance(value, Path):
                object.__setattr__(self, name, str(value))

    def _check_kinds(self) -> None:
        for name, kinds, allowed in _KINDS:
            value = getattr(self, name)
            if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
                raise RequestError(f"{name} must be {allowed}, got {value!r:.80}.")

    def _check_one_source_of_scales(self) -> None:
        given = [
            name
            for name in ("kv_scales", "calculate_kv_scales", "calibrate_on")
            if getattr(self, name) not in (None, False)
        ]
        if len(given) > 1:
            raise RequestError(
                f"{' and '.join(given)} were given, and each says where the scales come from. "
                f"Give one of them."
            )

    def _check_device(self) -> None:
        if not _DEVICE.fullmatch(self.device):
            raise RequestError(
                f"device={self.device!r} is not known. Allowed: auto, cpu, cuda, cuda:N."
            )
        share = self.gpu_memory_utilization
        if share is None:
            return
        if not 0 < share <= 1:
            raise RequestError(
                f"gpu_memory_utilization={share!r} is no share of a GPU's memory: give more than "
                f"0 and at most 1, like 0.9."
            )
        if self.kv_cache_memory is not None:
            raise RequestError(
                f"gpu_memory_utilization={share!r} and kv_cache_memory={self.kv_cache_memory} both "
                f"say how much memory the KV cache takes. Give one of them."
            )

    @property
    def measures_scales(self) -> bool:
        """Whether k and v scales are measured at start-up, before anything is served."""
        return self.calculate_kv_scales or self.calibrate_on is not None

    @property
    def skip_layers(self) -> tuple[str, ...]:
        """The skip list's entries as text, one by one; ``"0,3"`` is two entries."""
        given = self.kv_cache_dtype_skip_layers
        entries = [given] if isinstance(given, str | int) else given
        texts = (text.strip() for entry in entries for text in str(entry).split(","))
        return tuple(text for text in texts if text)


OPTION_FIELDS = {f.name: f for f in fields(EngineOptions)}
