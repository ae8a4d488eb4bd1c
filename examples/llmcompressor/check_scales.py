"""Refuse a checkpoint whose KV cache scales are not numbers that anybody measured.

    python check_scales.py FOLDER

llm-compressor 0.14.0 and 0.14.0.1 save q scales that were never written: zeros, denormals,
negatives, 1e38. They say so in one line of log a layer and end well. A scale is the largest
magnitude seen, divided by 448, or a float type's epsilon where all was zero: what does not lie
between 2^-50 and 2^50 nobody measured.
"""

import math
import re
import sys
from pathlib import Path

from safetensors import safe_open

SCALE = re.compile(r"\.[qkv]_scale$")
SMALLEST, LARGEST = 2.0**-50, 2.0**50


def refuse_unusable_scales(folder: Path) -> int:
    """Return how many KV cache scales ``folder`` holds.

    Raises:
        ValueError: there are none, or one is no scale; names the first and counts the others.
    """
    count, bad = 0, []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - the file is no dict
                if SCALE.search(name):
                    values = opened.get_tensor(name).float().flatten().tolist()
                    count += 1
                    good = all(math.isfinite(v) and SMALLEST <= v <= LARGEST for v in values)
                    if not good:
                        bad.append(f"{name} = {values}")
    if not count:
        raise ValueError(f"{folder} holds no KV cache scales.")
    if bad:
        raise ValueError(
            f"{len(bad)} of {count} scales in {folder} were never measured, such as {bad[0]}. "
            f"llm-compressor 0.14.0 and 0.14.0.1 write such q scales; use 0.13.0."
        )
    return count


if __name__ == "__main__":
    try:
        print(f"{refuse_unusable_scales(Path(sys.argv[1]))} usable scales")
    except ValueError as error:
        sys.exit(str(error))
