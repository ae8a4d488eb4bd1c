"""Native operations of a decoder layer; `csrc/cpu/step.h` in Python.

An operation is a ctypes structure that describes its tensors; `OperationList` runs several in one
call. All take [T, ...] tensors of one dtype (float32, bfloat16 or float16) whose last dimension is
contiguous. Letters as in docs/architecture.md, and I inputs, O outputs of a product.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Final

import torch

from kv8.kernels.cpu import FORMAT_NUMBERS, CpuKernels, check_result
from kv8.kernels.step_structs import (
    KINDS,
    GateStruct,
    LinearStruct,
    NormStruct,
    Operation,
    OperationStruct,
    RotaryStruct,
)

# Without a matrix unit, products of more rows are torch's, which repacks the weight each time.
# Where it gets to be faster was measured: between 64 and some hundreds, on any instruction set.
MOST_ROWS: Final = 64
UNLIMITED: Final = 1 << 30
# On one, the more inputs there are, the sooner torch's are faster: (inputs, rows up to which native
# ones are about as fast or faster), measured; with more inputs than these it is `MOST_ROWS`.
_MOST_ROWS_ON_UNIT: Final = ((2048, UNLIMITED), (4096, 128))
# There, products of so many rows or more need no scratch: kManyRows of csrc/cpu/linear_amx.h.
MOST_SCRATCH_ROWS: Final = 192


class OperationList:
    """Operations that run one after another in one call.

    The structures may be changed between calls; the tensors they describe must be kept alive by
    whoever made them.

    Attributes:
        operations: the structures.
    """

    def __init__(self, kernels: CpuKernels, operations: Sequence[Operation]) -> None:
        self.operations = tuple(operations)
        self._list = (OperationStruct * len(operations))(
            *(OperationStruct(ctypes.addressof(o), KINDS[type(o)]) for o in operations)
        )
        self._count = len(operations)
        self._address = ctypes.addressof(self._list)
        self._run = kernels.library.kv8_operations_run
        self._done = ctypes.c_int64()

    def run(
        self, num_rows: int, num_threads: int, give_scratch: Callable[[int], None] | None = None
    ) -> None:
        """Run them over T = ``num_rows`` rows.

        ``give_scratch`` is called with a number of bytes where attention needs more scratch than
        it was offered; the list goes on from there.
        """
        start, done = 0, self._done
        while start < self._count:
            at = self._address + start * ctypes.sizeof(OperationStruct)
            left = self._count - start
            needed = check_result(self._run(at, left, num_rows, num_threads, ctypes.byref(done)))
            start += done.value
            if needed:
                assert give_scratch is not None, "there is attention among the operations"
                give_scratch(needed)


def run_one(kernels: CpuKernels, operation: Operation, num_rows: int) -> None:
    """Run one operation over T = ``num_rows`` rows."""
    OperationList(kernels, [operation]).run(num_rows, torch.get_num_threads())


def can_multiply(weight: torch.Tensor) -> bool:
    """Whether `linear_struct` takes this weight [O, I]."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and weight.dim() == 2
        and weight.is_contiguous()
        and weight.shape[1] * weight.element_size() % 4 == 0
    )


def most_rows(kernels: CpuKernels, weight: torch.Tensor) -> int:
    """Return up to how many rows native products with this weight [O, I] are fast.

    Up to there, a row's product is the same bits however many rows there are.
    """
    num_outputs, num_inputs = weight.shape
    on_unit = (
        kernels.has_matrix_unit
        and weight.dtype == torch.bfloat16
        and num_outputs % 16 == 0
        and num_inputs % 32 == 0
    )
    if not on_unit:
        return MOST_ROWS
    return next((rows for inputs, rows in _MOST_ROWS_ON_UNIT if num_inputs <= inputs), MOST_ROWS)


def linear_struct(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    x: torch.Tensor,
    out: torch.Tensor,
    scratch: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    multiplier: float = 1.0,
) -> LinearStruct:
    """Describe ``out = x @ weight.T + bias``, or ``residual + (...) * multiplier``.

    Args:
        weight: [O, I]; see `can_multiply`.
        bias: [O] or `None`.
        x: [T, I].
        out: [T, O].
        scratch: float32, at least `scratch_size` values; on a matrix unit those of
            `MOST_SCRATCH_ROWS` rows suffice for more.
        residual: [T, O] or `None`; may be ``out``.
        multiplier: of the product, where there is a residual.
    """
    return LinearStruct(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        residual=None if residual is None else residual.data_ptr(),
        out=out.data_ptr(),
        x_stride=x.stride(0),
        residual_stride=0 if residual is None else residual.stride(0),
        out_stride=out.stride(0),
        num_inputs=weight.shape[1],
        num_outputs=weight.shape[0],
        scratch=scratch.data_ptr(),
        multiplier=multiplier,
        dtype=FORMAT_NUMBERS[weight.dtype],
    )


def scratch_size(num_rows: int, num_inputs: int) -> int:
    """Return how many float32 values of scratch a product needs."""
    return -(-num_rows // 16) * 16 * (-(-num_inputs // 32) * 32)


def norm_struct(
    weight: torch.Tensor,
    x: torch.Tensor,
    out: torch.Tensor,
    *,
    num_heads: int,
    epsilon: float,
    order: int,
    residual: torch.Tensor | None = None,
) -> NormStruct:
    """Describe a root mean square norm of each of ``num_heads`` parts of each row.

    Args:
        weight: [D].
        x: [T, num_heads * D].
        out: as ``x``, and may be ``x``.
        num_heads: parts of a row.
        epsilon: added to the mean square.
        order: of multiplication and rounding; see `csrc/cpu/step.h`.
        residual: as ``x``, added to the result; may be ``out``.
    """
    return NormStruct(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        residual=None if residual is None else residual.data_ptr(),
        out=out.data_ptr(),
        x_stride=x.stride(0),
        residual_stride=0 if residual is None else residual.stride(0),
        out_stride=out.stride(0),
        num_heads=num_heads,
        size=weight.shape[0],
        epsilon=epsilon,
        order=order,
        dtype=FORMAT_NUMBERS[x.dtype],
    )


def rotary_struct(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, num_heads: int
) -> RotaryStruct:
    """Describe the rotary embedding of ``x`` [T, num_heads * D], in place.

    ``cos`` and ``sin`` are [T, rotary] and contiguous, of x's dtype or float32; rotary is even and
    at most D.
    """
    return RotaryStruct(
        x=x.data_ptr(),
        cos=cos.data_ptr(),
        sin=sin.data_ptr(),
        x_stride=x.stride(0),
        num_heads=num_heads,
        size=x.shape[1] // num_heads,
        rotary=cos.shape[-1],
        dtype=FORMAT_NUMBERS[x.dtype],
        angle_dtype=FORMAT_NUMBERS[cos.dtype],
    )


def gate_struct(
    gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor, *, function: int
) -> GateStruct:
    """Describe ``out = f(gate) * up``, all [T, I]; ``gate`` and ``up`` have the same stride."""
    assert gate.stride(0) == up.stride(0)
    return GateStruct(
        gate=gate.data_ptr(),
        up=up.data_ptr(),
        out=out.data_ptr(),
        in_stride=gate.stride(0),
        out_stride=out.stride(0),
        size=gate.shape[1],
        function=function,
        dtype=FORMAT_NUMBERS[gate.dtype],
    )
