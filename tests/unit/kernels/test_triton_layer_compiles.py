"""The kernels between a layer's products compile for GPUs that are not here."""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from kv8.kernels.triton_elementwise import gate_kernel, norm_kernel, rotary_kernel

KERNELS = (
    (norm_kernel, "x residual weight total out", "x_stride residual_stride out_stride",
     "epsilon multiplier", dict(SIZE=4096, PADDED=4096, ORDER=0, MULTIPLIES=False)),
    (norm_kernel, "x weight out", "x_stride residual_stride out_stride", "epsilon multiplier",
     dict(SIZE=128, PADDED=128, ORDER=1, MULTIPLIES=False, residual=None, total=None)),
    (rotary_kernel, "x cosines sines", "token_stride angle_stride num_heads", "",
     dict(HEAD_DIM=128, HALF=64, PADDED_HALF=64, HEADS=8)),
    (gate_kernel, "gate up out", "gate_stride up_stride out_stride size", "",
     dict(BLOCK=1024, ACTIVATION=1)),
)
found = []
for capability in (80, 90):
    for kernel, pointers, integers, floats, constants in KERNELS:
        kinds = dict.fromkeys(pointers.split(), "*bf16") | dict.fromkeys(integers.split(), "i32")
        kinds |= dict.fromkeys(floats.split(), "fp32") | dict.fromkeys(constants, "constexpr")
        source = ASTSource(
            fn=kernel, signature={name: kinds[name] for name in kernel.arg_names},
            constexprs=constants, attrs={},
        )
        built = compile(source, target=GPUTarget("cuda", capability, 32))
        found.append([kernel.fn.__name__, capability, len(built.asm["cubin"])])
print(json.dumps(found))
"""


def test_every_kernel_compiles() -> None:
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    built = json.loads(result.stdout)
    assert {name for name, _, _ in built} == {"norm_kernel", "rotary_kernel", "gate_kernel"}
    assert all(size > 1000 for _, _, size in built)
