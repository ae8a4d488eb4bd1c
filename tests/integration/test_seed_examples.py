"""The serving examples of vLLM's page on quantized KV caches, with ``vllm`` replaced by ``kv8``.

Only the model is another: a tiny one made on the spot, so its text is noise.
"""

from tests.command_line import kv8


def test_no_calibration(tiny_model, capsys) -> None:
    model = str(tiny_model("llama"))

    from kv8 import LLM, SamplingParams

    sampling_params = SamplingParams(temperature=0.7, top_p=0.8)
    llm = LLM(
        model=model,
        kv_cache_dtype="fp8",
    )
    prompt = "London is the capital of"
    out = llm.generate(prompt, sampling_params)[0].outputs[0].text
    print(out)

    assert capsys.readouterr().out == out + "\n"
    report = llm.kv_cache_report()
    assert {layer.dtype for layer in report.layers} == {"fp8_e4m3"}
    for layer in report.layers:
        assert layer.k is not None
        assert layer.v is not None
        assert layer.k.values == layer.v.values == (1.0,)
        assert str(layer.k.origin).startswith("default")


def test_skipping_layers_from_python(tiny_model) -> None:
    model = str(tiny_model("gemma3"))

    from kv8 import LLM

    llm = LLM(
        model=model,
        kv_cache_dtype="fp8",
        kv_cache_dtype_skip_layers=["sliding_window"],
    )

    layers = llm.kv_cache_report().layers
    assert [layer.dtype for layer in layers] == ["float32"] * 3 + ["fp8_e4m3"]
    assert [layer.skipped_by for layer in layers] == ["sliding_window"] * 3 + [None]
    assert len(llm.generate("London", use_tqdm=False)[0].outputs[0].token_ids) > 0


def test_skipping_every_sliding_window_layer_by_flag(tiny_model) -> None:
    words = ["--kv-cache-dtype", "fp8", "--kv-cache-dtype-skip-layers", "sliding_window", "--json"]
    result = kv8("inspect", tiny_model("gemma3"), *words)
    assert result.code == 0
    assert [layer["skipped"] for layer in result.json["layers"]] == [True, True, True, False]


def test_skipping_layers_by_number_by_flag(tiny_model) -> None:
    words = ["--kv-cache-dtype", "fp8", "--kv-cache-dtype-skip-layers", "0", "1", "3", "--json"]
    result = kv8("generate", tiny_model("llama"), "London", *words)
    assert result.code == 0
    assert result.json["kv_cache"]["dtypes"] == {"float32": 3, "fp8_e4m3": 1}
