"""Scales measured at start-up: an explicit step, on declared tokens, fixed before any request."""

import logging
from pathlib import Path

import pytest
import torch
from tests.engines import first_logprobs, run, tokens
from tests.observing import numbers
from tests.tiny_models import FAMILIES, TinyModel, prompt_ids

from kv8.calibration.start_up import start_engine
from kv8.engine.engine import Engine
from kv8.engine.resolve import resolve_options
from kv8.engine.runner import ScaleStatus
from kv8.errors import RequestError
from kv8.llm import LLM
from kv8.options import EngineOptions
from kv8.scales.scale import OriginKind

MEMORY = "2MiB"


def start(folder: Path, **options: object) -> Engine:
    options = {"kv_cache_dtype": "fp8", "kv_cache_memory": MEMORY, **options}
    return start_engine(EngineOptions(model=str(folder), **options), check_invariants=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_layer_is_measured_and_shown(tiny_model: TinyModel, family: str) -> None:
    """Pitfall 19: the result is there to see: no layer of any family keeps 1.0, all say how."""
    folder = tiny_model(family, dtype=torch.bfloat16)
    with LLM(folder, kv_cache_dtype="fp8", calculate_kv_scales=True, kv_cache_memory=MEMORY) as llm:
        report = llm.kv_cache_report()
        assert report.calibrated
        for layer in report.layers:
            for scale in (layer.k, layer.v):
                assert scale is not None
                assert scale.values[0] != 1.0
                assert (
                    "2,048 random tokens, absmax" in str(scale.origin)
                    or layer.reads_layer is not None
                )
        assert "random tokens, absmax" in str(report)
        assert llm.engine.scale_status is ScaleStatus.CALIBRATED


def test_requests_never_move_the_scales(tiny_model: TinyModel) -> None:
    """Pitfall 20: probes, short and long requests: the scales stay those of the start."""
    engine = start(tiny_model(), calculate_kv_scales=True)
    scales, key = numbers(engine.runner.scales), engine.runner.cache_key()
    tensors = [layer.k_scale.clone() for layer in engine.runner.layers.values()]
    run(engine, [prompt_ids(13)], max_tokens=2)
    run(engine, [prompt_ids(300), prompt_ids(7)], max_tokens=4)
    assert numbers(engine.runner.scales) == scales
    assert engine.runner.cache_key() == key
    for layer, before in zip(engine.runner.layers.values(), tensors, strict=True):
        assert torch.equal(layer.k_scale, before)


def test_the_first_token_is_stored_under_the_final_scale(tiny_model: TinyModel) -> None:
    """Pitfall 20: an engine given the measured numbers gives the same logits from the first token.

    So neither the start-up probe nor anything stored before was under another scale.
    """
    folder = tiny_model(dtype=torch.bfloat16)
    measured = start(folder, calculate_kv_scales=True)
    given = {
        layer: {"k": scales.k.values[0], "v": scales.v.values[0]}
        for layer, scales in measured.runner.scales
    }
    told = start(folder, kv_scales=given)
    outputs = [
        run(engine, [prompt_ids(50), prompt_ids(3)], max_tokens=6, logprobs=5)
        for engine in (measured, told)
    ]
    assert tokens(outputs[0]) == tokens(outputs[1])
    assert first_logprobs(outputs[0]) == first_logprobs(outputs[1])


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_it_is_the_same_every_time(tiny_model: TinyModel, backend: str) -> None:
    """Pitfall 19: with kernels and without, twice: the same scales."""
    engines = [
        start(tiny_model(), calculate_kv_scales=True, attention_backend=backend) for _ in range(2)
    ]
    one, other = (numbers(engine.runner.scales) for engine in engines)
    assert one == other
    seeded = start(tiny_model(), calculate_kv_scales=True, seed=1)
    assert numbers(seeded.runner.scales) != one


def test_a_text_of_ones_own(tiny_model: TinyModel, tmp_path: Path, caplog) -> None:
    """Pitfall 20: the log says how many tokens were asked for and how many there were."""
    text = tmp_path / "mine.txt"
    text.write_text("Nothing here is random. " * 10)
    with caplog.at_level(logging.INFO):
        engine = start(tiny_model(), calibrate_on=text)
    origins = {str(scales.k.origin) for _, scales in engine.runner.scales}
    assert len(origins) == 1
    (origin,) = origins
    assert origin.endswith("tokens, absmax")
    assert "random" not in origin
    assert "tokens used of 16,384 asked for. They are fixed now." in caplog.text


def test_no_warning_speaks_of_the_time_before(tiny_model: TinyModel, caplog) -> None:
    """The uncalibrated cache that never was is not complained about."""
    start(tiny_model("qwen2", key_bias_layers=(0, 3)), calculate_kv_scales=True)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_query_scales_are_measured_for_fp8_attention(tiny_model: TinyModel) -> None:
    engine = start(tiny_model(), calculate_kv_scales=True, query_dtype="fp8")
    assert engine.config.fp8_queries
    for _, scales in engine.runner.scales:
        assert scales.q.origin.kind is OriginKind.CALIBRATION
    assert not start(tiny_model(), calculate_kv_scales=True).config.fp8_queries


def test_skipped_layers_need_none(tiny_model: TinyModel) -> None:
    engine = start(tiny_model(), calculate_kv_scales=True, kv_cache_dtype_skip_layers=[0, 2])
    assert {layer for layer, _ in engine.runner.scales} == {1, 3}


def test_a_cache_without_scales_refuses(tiny_model: TinyModel, tmp_path: Path) -> None:
    for options in ({"calculate_kv_scales": True}, {"calibrate_on": tmp_path}):
        with pytest.raises(RequestError, match=f"{next(iter(options))} was given, but no layer's"):
            start(tiny_model(), kv_cache_dtype="auto", **options)


@pytest.mark.parametrize(
    "options",
    [
        {"calculate_kv_scales": True, "calibrate_on": "x.txt"},
        {"calculate_kv_scales": True, "kv_scales": "x.safetensors"},
        {"calibrate_on": "x.txt", "kv_scales": {0: {"k": 1.0}}},
    ],
)
def test_scales_have_one_source(options: dict) -> None:
    with pytest.raises(RequestError, match="each says where the scales come from"):
        EngineOptions(model="any", **options)


def test_odd_values_are_refused() -> None:
    with pytest.raises(RequestError, match="calculate_kv_scales must be True or False"):
        EngineOptions(model="any", calculate_kv_scales=1)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="calibrate_on must be the name of a text"):
        EngineOptions(model="any", calibrate_on=3)  # type: ignore[arg-type]


def test_a_text_that_is_not_there_is_named(tiny_model: TinyModel) -> None:
    with pytest.raises(RequestError, match=r"missing\.txt"):
        start(tiny_model(), calibrate_on="missing.txt")


def test_before_the_start_the_plan_says_that_scales_will_be_measured(tiny_model: TinyModel) -> None:
    options = EngineOptions(
        model=str(tiny_model()),
        kv_cache_dtype="fp8",
        calculate_kv_scales=True,
        kv_cache_memory=MEMORY,
    )
    assert (
        "k and v scales = to be measured (on random tokens" in resolve_options(options).describe()
    )
