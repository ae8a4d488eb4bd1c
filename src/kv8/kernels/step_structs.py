"""The structures of `csrc/cpu/step.h`: what describes an operation to the native kernels."""

import ctypes
from typing import Final

from kv8.kernels.cpu import AttendStruct, StoreStruct


class LinearStruct(ctypes.Structure):
    """`kv8_linear`."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("residual_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("num_inputs", ctypes.c_int64),
        ("num_outputs", ctypes.c_int64),
        ("scratch", ctypes.c_void_p),
        ("multiplier", ctypes.c_float),
        ("dtype", ctypes.c_int32),
    )


class NormStruct(ctypes.Structure):
    """`kv8_norm`."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("residual_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("epsilon", ctypes.c_float),
        ("order", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    )


class RotaryStruct(ctypes.Structure):
    """`kv8_rotary`."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("rotary", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("angle_dtype", ctypes.c_int32),
    )


class GateStruct(ctypes.Structure):
    """`kv8_gate`."""

    _fields_ = (
        ("gate", ctypes.c_void_p),
        ("up", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("in_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("function", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    )


class GatedStruct(ctypes.Structure):
    """`kv8_gated`."""

    _fields_ = (("both", LinearStruct), ("gate", GateStruct))


class OperationStruct(ctypes.Structure):
    """`kv8_operation`."""

    _fields_ = (("arguments", ctypes.c_void_p), ("kind", ctypes.c_int64))


Operation = (
    LinearStruct | NormStruct | RotaryStruct | GateStruct | GatedStruct | StoreStruct | AttendStruct
)
KINDS: Final[dict[type, int]] = {
    LinearStruct: 0,
    NormStruct: 1,
    RotaryStruct: 2,
    GateStruct: 3,
    StoreStruct: 4,
    AttendStruct: 5,
    GatedStruct: 6,
}
