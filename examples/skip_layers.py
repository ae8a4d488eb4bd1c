"""Leave some layers in the model's dtype: by type, by number, from either end.

Run: python examples/skip_layers.py [MODEL]
"""

import sys

from kv8 import LLM

model = sys.argv[1] if len(sys.argv) > 1 else "gemma3-270m"

for skip in (["sliding_window"], ["first:2", "last:2"], [0, "-1"]):
    with LLM(
        model,
        kv_cache_dtype="fp8",
        kv_cache_dtype_skip_layers=skip,
        kv_cache_memory="64MiB",
        max_model_len=512,
    ) as llm:
        print(f"{skip}:\n{llm.kv_cache_report().summary()}\n")
