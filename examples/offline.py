"""Complete prompts through an FP8 KV cache and look at what it stored.

Run: python examples/offline.py [MODEL]
"""

import sys

from kv8 import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
prompts = ["London is the capital of", "The three primary colours are"]
sampling_params = SamplingParams(temperature=0.7, top_p=0.8, max_tokens=24, seed=1)

with LLM(model=model, kv_cache_dtype="fp8", kv_cache_memory="64MiB") as llm:
    for output in llm.generate(prompts, sampling_params):
        print(f"{output.prompt}{output.outputs[0].text}\n")
    print(llm.kv_cache_report().summary())
