"""The same greedy completion through each format of the KV cache, and the bytes a token takes.

Run: python examples/compare_formats.py [MODEL]
"""

import sys

from kv8 import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
prompt = "Once upon a time there was a little robot who"
greedy = SamplingParams(temperature=0, max_tokens=16)

for kv_cache_dtype in ("auto", "fp8_e4m3", "fp8_e5m2"):
    with LLM(model, kv_cache_dtype=kv_cache_dtype, kv_cache_memory="64MiB") as llm:
        [output] = llm.generate(prompt, greedy, use_tqdm=False)
        num_bytes = llm.kv_cache_report().capacity.bytes_per_token
    text = " ".join(output.outputs[0].text.split())
    print(f"{kv_cache_dtype:9} {num_bytes:6,} bytes a token  {prompt} {text}")
