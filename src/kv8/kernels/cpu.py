"""The CPU kernels of csrc/cpu: the library, its structures, and what it says of this machine.

The library has a plain C interface (csrc/cpu/kernels.h) and knows nothing of Python or torch, so
one build serves every version of both.
"""

import ctypes
import logging
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from kv8.kernels.openmp import openmp_runtimes, share_openmp_runtime

logger = logging.getLogger(__name__)

LIBRARY: Final = Path(__file__).with_name("libkv8_cpu.so")
ISA_NAMES: Final = (
    "plain C++",
    "AVX2",
    "AVX-512 with VBMI",
    "AVX-512 with bfloat16",
    "AVX-512 with AMX",
)
MAX_HEAD_DIM: Final = 512

# Numbers of kv8_format, by the torch dtype of codes and tensors.
FORMAT_NUMBERS: Final = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
}

_OUT_OF_CACHE, _BAD_LENGTHS = -1, -2


class CacheStruct(ctypes.Structure):
    """`kv8_cache` of csrc/cpu/kernels.h."""

    _fields_ = (
        ("k_codes", ctypes.c_void_p),
        ("v_codes", ctypes.c_void_p),
        ("k_block_stride", ctypes.c_int64),
        ("v_block_stride", ctypes.c_int64),
        ("k_scale", ctypes.c_void_p),
        ("v_scale", ctypes.c_void_p),
        ("num_blocks", ctypes.c_int64),
        ("block_size", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("format", ctypes.c_int32),
    )


class RowsStruct(ctypes.Structure):
    """`kv8_rows`: a tensor [T, heads, D] whose last dimension is contiguous."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("token_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
    )


class StoreStruct(ctypes.Structure):
    """`kv8_store`."""

    _fields_ = (
        ("cache", ctypes.POINTER(CacheStruct)),
        ("key", RowsStruct),
        ("value", RowsStruct),
        ("slots", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int64),
        ("k_counts", ctypes.c_void_p),
        ("v_counts", ctypes.c_void_p),
    )


class AttendStruct(ctypes.Structure):
    """`kv8_attend`."""

    _fields_ = (
        ("cache", ctypes.POINTER(CacheStruct)),
        ("query", RowsStruct),
        ("output", RowsStruct),
        ("query_starts", ctypes.c_void_p),
        ("context_lens", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("table_width", ctypes.c_int64),
        ("num_sequences", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("q_scale", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("softmax_scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("num_heads", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("scratch", ctypes.c_void_p),
        ("scratch_bytes", ctypes.c_int64),
    )


def describe_rows(rows: RowsStruct, tensor: torch.Tensor) -> None:
    """Let ``rows`` describe ``tensor`` [T, heads, D]; its last dimension must be contiguous."""
    token_stride, head_stride, one = tensor.stride()
    assert one == 1, f"last dimension has stride {one}"
    size = tensor.element_size()
    rows.data = tensor.data_ptr()
    rows.token_stride, rows.head_stride = token_stride * size, head_stride * size
    rows.dtype = FORMAT_NUMBERS[tensor.dtype]


@dataclass(frozen=True)
class CpuKernels:
    """The loaded library. Get one from `load_kernels`."""

    library: ctypes.CDLL

    def store(self, arguments: StoreStruct) -> None:
        """Quantize, scatter and count; see `kv8_store_run`."""
        check_result(self.library.kv8_store_run(ctypes.byref(arguments), torch.get_num_threads()))

    def attend(self, arguments: AttendStruct) -> int:
        """Attend over stored codes. Returns 0, or the bytes of scratch it needs and has not got."""
        return check_result(
            self.library.kv8_attend_run(ctypes.byref(arguments), torch.get_num_threads())
        )

    def prefer_large_pages(self, memory: torch.Tensor) -> None:
        """Ask the system for large pages for memory that nobody has written to yet."""
        self.library.kv8_prefer_large_pages(memory.data_ptr(), memory.nbytes)

    @property
    def isa(self) -> int:
        """The build in use, an index of `ISA_NAMES`."""
        return int(self.library.kv8_isa())

    @property
    def has_matrix_unit(self) -> bool:
        """Whether the build in use multiplies bfloat16 on one (AMX)."""
        return self.isa == len(ISA_NAMES) - 1

    def use_isa(self, isa: int) -> int:
        """Choose another build, for tests; return the one in use, which the CPU may limit."""
        return int(self.library.kv8_use_isa(isa))


def load_kernels(*, announce: bool = True) -> CpuKernels:
    """Return the kernels; ``announce`` what was loaded in the log.

    Raises:
        ImportError: they were not built, or cannot be loaded here; says what to do.
    """
    if not LIBRARY.exists():
        note = LIBRARY.with_name("not_built.txt")
        reason = note.read_text().strip() if note.exists() else "they were not built"
        raise ImportError(
            f"kv8 was installed without its CPU kernels: {reason}. To have them, install a C++ "
            f"compiler (g++ or clang++) and install kv8 again"
        )
    runtime = share_openmp_runtime()
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise ImportError(
            f"{LIBRARY} does not load on this {platform.machine()} machine (OpenMP runtime "
            f"{runtime}): {error}"
        ) from error
    for name in ("kv8_store_run", "kv8_attend_run"):
        function = getattr(library, name)
        function.restype = ctypes.c_int64
        function.argtypes = (ctypes.c_void_p, ctypes.c_int32)
    library.kv8_operations_run.restype = ctypes.c_int64
    library.kv8_operations_run.argtypes = (
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_int32,
        ctypes.c_void_p,
    )
    library.kv8_prefer_large_pages.restype = None
    library.kv8_prefer_large_pages.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    kernels = CpuKernels(library)
    if not announce:
        return kernels
    logger.info(
        "CPU kernels: %s build, %d threads, OpenMP runtime %s",
        ISA_NAMES[kernels.isa],
        torch.get_num_threads(),
        runtime or "none: one thread",
    )
    others = [str(path) for path in openmp_runtimes() if path != runtime]
    if others:
        logger.warning(
            "This process has more than one OpenMP runtime: torch and the kernels use %s, somebody "
            "else loaded %s. Their threads compete for the same cores, which can slow everything "
            "down many times; import torch before whatever loads the other.",
            runtime,
            ", ".join(others),
        )
    return kernels


def check_result(result: int) -> int:
    """Return what a kernel returned, the bytes of scratch it lacks, unless that is an error."""
    assert result != _OUT_OF_CACHE, "a slot or block number lies outside the cache"
    assert result != _BAD_LENGTHS, "query starts, context lengths and block table do not fit"
    return result
