"""An uncalibrated cache that clips says so, once, with layers, shares and the way out."""

import logging

import pytest
import torch
from tests.engines import run, start_engine, teacher_forced
from tests.tiny_models import prompt_ids

from kv8.engine.runner import ScaleStatus

IDS = prompt_ids(64, seed=1)


def clip_warnings(caplog) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING and "clips values" in record.getMessage()
    ]


def divergence(engine, exact) -> float:
    """Return the mean KL divergence (nats) of the engine's next tokens from ``exact``."""
    ours = teacher_forced(engine, IDS, chunks=[64])
    return float((exact.exp() * (exact - ours)).sum(dim=-1).mean())


@pytest.fixture
def biased(tiny_model):
    """Return a model whose keys have a bias of norm 900 in layers 0 and 3, as Qwen2's have."""
    return tiny_model("qwen2", key_bias_layers=(0, 3))


def test_start_warns_with_layers_share_and_remedies(biased, caplog) -> None:
    """Pitfall 39: large key biases are found by the start-up probe, not by the first user."""
    engine = start_engine(biased, kv_cache_dtype="fp8")
    (message,) = clip_warnings(caplog)
    assert "layer 0 k" in message
    assert "layer 3 k" in message
    assert "layer 1" not in message
    assert " %" in message
    assert "--kv-scales" in message
    assert "calibrate" in message
    assert message.endswith("--kv-cache-dtype-skip-layers 0,3")
    assert engine.scale_status is ScaleStatus.UNCALIBRATED
    run(engine, [IDS], max_tokens=8)
    assert len(clip_warnings(caplog)) == 1  # said once


def test_the_start_up_probe_leaves_nothing_behind(biased) -> None:
    engine = start_engine(biased, kv_cache_dtype="fp8")
    counts = engine.runner.counters.read()
    assert sorted(counts) == [0, 1, 2, 3]
    assert {(c.k.stored, c.k.saturated, c.v.stored) for c in counts.values()} == {(0, 0, 0)}
    assert engine.cache.num_free_blocks == engine.cache.num_blocks
    assert engine.cache.num_cached_blocks == engine.cache.stats.queries == 0
    run(engine, [IDS], max_tokens=1)
    stored = {c.k.stored for c in engine.runner.counters.read().values()}
    assert stored == {len(IDS) * engine.config.geometry.layers[0].values_per_token // 2}


def test_the_remedies_work(biased, caplog) -> None:
    """Pitfall 39: calibrated, or with the suggested skip list, the model answers as before."""
    exact = teacher_forced(start_engine(biased), IDS, chunks=[64])
    noise = divergence(start_engine(biased, kv_cache_dtype="fp8"), exact)
    caplog.clear()
    skipped = start_engine(biased, kv_cache_dtype="fp8", kv_cache_dtype_skip_layers="0,3")
    biggest = {layer: 900.0 if layer in (0, 3) else 20.0 for layer in range(4)}
    scales = {n: {"k": top / 448, "v": 20 / 448} for n, top in biggest.items()}
    calibrated = start_engine(biased, kv_cache_dtype="fp8", kv_scales=scales)
    assert divergence(skipped, exact) < noise / 10
    assert divergence(calibrated, exact) < noise / 2
    assert clip_warnings(caplog) == []


def test_e5m2_is_watched_like_any_quantized_format(tiny_model, caplog) -> None:
    """Pitfall 40: e5m2 is quantized too: what goes beyond its range is reported."""

    def grow(model) -> None:
        model.model.layers[1].self_attn.v_proj.weight.mul_(1e5)

    folder = tiny_model("qwen2", edit=grow)
    start_engine(folder, kv_cache_dtype="fp8_e5m2")
    (message,) = clip_warnings(caplog)
    assert message.startswith("The fp8_e5m2 KV cache clips values")
    assert "layer 1 v" in message


def test_e5m2_holds_the_key_bias_that_e4m3_clips(biased, caplog) -> None:
    """Pitfall 40: within its range e5m2 clips nothing, and a given scale is used."""
    exact = teacher_forced(start_engine(biased), IDS, chunks=[64])
    wide = start_engine(biased, kv_cache_dtype="fp8_e5m2")
    assert clip_warnings(caplog) == []
    assert divergence(wide, exact) < divergence(start_engine(biased, kv_cache_dtype="fp8"), exact)
    scaled = start_engine(
        biased, kv_cache_dtype="fp8_e5m2", kv_scales={n: {"k": 0.3, "v": 0.3} for n in range(4)}
    )
    first, second = (e.runner.pool.codes(0)[0].view(torch.uint8) for e in (wide, scaled))
    run(wide, [IDS])
    run(scaled, [IDS])
    assert not torch.equal(first, second)


def test_saturation_in_service_warns_once(tiny_model, caplog) -> None:
    """Pitfall 39: what only real text brings out is reported too, and only once."""
    special = 200

    def rare_token(model) -> None:  # one token whose values are beyond anything else
        model.model.embed_tokens.weight[special] = 0
        model.model.embed_tokens.weight[special, 0] = 1.0
        for layer in model.model.layers[:1]:
            layer.input_layernorm.weight.fill_(1.0)
            layer.self_attn.v_proj.weight[:, 0] = 100.0

    folder = tiny_model("llama", edit=rare_token)
    engine = start_engine(folder, kv_cache_dtype="fp8")
    warned_at_start = clip_warnings(caplog)
    for seed in range(40):
        run(engine, [[special] * 8, prompt_ids(8, seed=seed)], max_tokens=2)
    (message,) = clip_warnings(caplog)
    assert warned_at_start == []
    assert "layer 0 v" in message
    assert "Share clipped so far" in message


def test_a_16_bit_cache_never_speaks_of_scales(biased, caplog) -> None:
    """Pitfall 12: nothing is quantized, so nothing is said about scales."""
    with caplog.at_level(logging.INFO, logger="kv8"):
        run(start_engine(biased), [IDS])
    assert not any("scale" in record.getMessage() for record in caplog.records)
