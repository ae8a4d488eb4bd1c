"""The built-in models against goldens and against llama.cpp reading the same files."""

import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from kv8.models.builtin import BUILTIN_MODELS, cached_gguf
from kv8.models.conversion_cache import PROVENANCE
from kv8.models.source import resolve_source
from kv8.models.source_folder import check_folder
from kv8.models.tokenizer import load_tokenizer

pytestmark = pytest.mark.model

GOLDEN = Path(__file__).parent.parent / "golden" / "models"
GOLDEN_NAMES = {"smollm2": "smollm2-135m", "gemma3-270m": "gemma3-270m"}

# In a process of its own: llama.cpp brings its own OpenMP runtime, and one prompt token at a time
# keeps it off the matrix instructions that some virtual machines announce but do not run.
JUDGE = """
import json, sys, llama_cpp, numpy as np
judge = llama_cpp.Llama(
    sys.argv[1], n_ctx=64, n_batch=1, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False
)
tokens = judge.tokenize(sys.argv[2].encode(), add_bos=True, special=True)
text = judge(sys.argv[2], max_tokens=8, temperature=0)["choices"][0]["text"]
judge.reset()
judge.eval(tokens)
np.save(sys.argv[3], np.array(judge.scores[: len(tokens)]))
print(json.dumps({"tokens": tokens, "text": text}))
"""


def golden(name, what):
    return json.loads((GOLDEN / f"{GOLDEN_NAMES[name]}.{what}.json").read_text())


@pytest.fixture(scope="module", params=list(GOLDEN_NAMES))
def source(request):
    return resolve_source(request.param)


@pytest.fixture(scope="module")
def tokenizer(source):
    return load_tokenizer(source)


def test_folder(source):
    check_folder(source.folder)
    provenance = json.loads((source.folder / PROVENANCE).read_text())
    assert provenance["sha256"] == BUILTIN_MODELS[source.name].sha256


def test_config(source):
    ours = json.loads((source.folder / "config.json").read_text())
    theirs = golden(source.name, "config")
    del ours["transformers_version"], theirs["transformers_version"]
    assert ours == theirs


def test_end_tokens(source, tokenizer):
    generation = json.loads((source.folder / "generation_config.json").read_text())
    texts = {"smollm2": ["<|im_end|>", "<|endoftext|>"], "gemma3-270m": ["<eos>", "<end_of_turn>"]}
    assert tokenizer.convert_ids_to_tokens(generation["eos_token_id"]) == texts[source.name]
    assert tokenizer.eos_token == texts[source.name][0]


def test_tensors(source):
    assert described(source.folder) == golden(source.name, "tensors")


def described(folder):
    """Return dtype, shape and digest of every tensor, as the goldens have them."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: describe(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118


def describe(tensor):
    digest = hashlib.sha256(tensor.view(torch.uint8).numpy().data).hexdigest()[:16]
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), digest]


def test_tokens(source, tokenizer):
    check_tokens(source, tokenizer)


def test_tokens_as_transformers_loads_them(source):
    check_tokens(source, AutoTokenizer.from_pretrained(source.folder))


def check_tokens(source, tokenizer):
    expected = golden(source.name, "tokens")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (expected["bos"], expected["eos"])
    assert len(expected["cases"]) == 20
    for case in expected["cases"]:
        text, options = case["text"], {"add_special_tokens": False}
        assert tokenizer.encode(text, **options) == case["ids"]
        assert tokenizer.encode(text, split_special_tokens=True, **options) == case["ids_plain"]
        assert tokenizer.decode(case["ids"]) == text
        assert tokenizer.decode(case["ids_plain"]) == text


def test_begin_token(source, tokenizer):
    """Gemma's prompts start with <bos>, SmolLM2's do not."""
    begin = tokenizer.encode("ok")[0] == tokenizer.bos_token_id
    assert begin is (source.name == "gemma3-270m")


def test_chat_template(source, tokenizer):
    if source.name == "gemma3-270m":
        assert tokenizer.chat_template is None  # a base model
        return
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_kill_9_during_a_conversion(tmp_path, monkeypatch):
    """One process is killed half-way while a second waits for it: the second gets a whole model."""
    path = cached_gguf("smollm2")
    cache = tmp_path / "cache"
    monkeypatch.setenv("KV8_CACHE", str(cache))
    code = "import sys; from kv8.models.source import resolve_source; resolve_source(sys.argv[1])"
    command = [sys.executable, "-c", code, path]
    killed = subprocess.Popen(command)
    # The config is written first and the weights, which take seconds, last.
    while not list(cache.glob("*.partial-*/result/config.json")):
        assert killed.poll() is None
        time.sleep(0.005)
    waiting = subprocess.Popen(command)
    killed.kill()
    killed.wait()
    assert not list(cache.glob("*/config.json"))
    assert waiting.wait() == 0
    assert len(list(cache.iterdir())) == 2  # the model and its lock
    assert described(resolve_source(str(path)).folder) == golden("smollm2", "tensors")


def test_the_continuation_is_the_one_llama_cpp_gave(source, tokenizer):
    recorded = golden(source.name, "continuation")
    tokens = tokenizer.encode(recorded["prompt"])
    assert tokens == recorded["tokens"]
    model = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32)
    output = model.generate(torch.tensor([tokens]), max_new_tokens=8, do_sample=False)[0]
    assert tokenizer.decode(output[len(tokens) :]) == recorded["text"]


def test_llama_cpp_itself_predicts_alike(source, tokenizer, tmp_path, update_golden):
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed: make test-oracle")
    prompt = "London is the capital of"
    command = [
        sys.executable,
        "-c",
        JUDGE,
        cached_gguf(source.name),
        prompt,
        tmp_path / "logits.npy",
    ]
    judged = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    record = GOLDEN / f"{GOLDEN_NAMES[source.name]}.continuation.json"
    if update_golden:
        record.write_text(json.dumps({"prompt": prompt, **judged}, indent=1) + "\n")
    assert {"prompt": prompt, **judged} == json.loads(record.read_text())
    assert judged["text"].startswith(" the United Kingdom")

    tokens = judged["tokens"]
    model = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32)
    with torch.no_grad():
        ours = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    theirs = torch.from_numpy(np.load(tmp_path / "logits.npy")).log_softmax(-1)
    divergence = (ours.exp() * (ours - theirs)).sum(-1)
    # llama.cpp multiplies with activations in 8 bits; that noise was measured as 0.006 to 0.026
    # nats over several prompts and both models. One projection permuted wrongly gives several.
    assert divergence.max() < 0.1
