"""The formats a KV cache can store values in: names, ranges, bytes. No torch in here.

Source of the FP8 ranges: Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv 2209.05433),
table 1; ``fp8_e4m3`` is the variant without infinities that PyTorch calls ``float8_e4m3fn``.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class KVFormat:
    """How one stored value is represented.

    Attributes:
        name: concrete name, never an alias (``fp8_e4m3``).
        torch_dtype: name of the torch dtype of the stored codes (``float8_e4m3fn``).
        bytes_per_value: bytes of one code.
        finite_max: largest finite magnitude a code can hold.
        smallest: smallest positive magnitude a code can hold (subnormals included).
        quantized: whether values are divided by a scale before they are stored.
    """

    name: str
    torch_dtype: str
    bytes_per_value: int
    finite_max: float
    smallest: float
    quantized: bool


FP8_E4M3: Final = KVFormat("fp8_e4m3", "float8_e4m3fn", 1, 448.0, 2.0**-9, True)
FP8_E5M2: Final = KVFormat("fp8_e5m2", "float8_e5m2", 1, 57344.0, 2.0**-16, True)
BFLOAT16: Final = KVFormat("bfloat16", "bfloat16", 2, 3.3895313892515355e38, 2.0**-133, False)
FLOAT16: Final = KVFormat("float16", "float16", 2, 65504.0, 2.0**-24, False)
FLOAT32: Final = KVFormat("float32", "float32", 4, 3.4028234663852886e38, 2.0**-149, False)

FORMATS: Final = {f.name: f for f in (FP8_E4M3, FP8_E5M2, BFLOAT16, FLOAT16, FLOAT32)}
ALIASES: Final = {"fp8": "fp8_e4m3"}
