"""What a GPU's cache gets: the share, less weights, the largest step and graphs, all measured."""

import pytest
import torch
from tests.engines import start_engine
from tests.recorded_steps import DeviceLengthsBackend, OperationCapture

from kv8.attention import select
from kv8.engine.gpu_memory import MemoryBudget, open_budget
from kv8.engine.largest_step import lengths_of_largest_step, run_largest_step
from kv8.engine.resolve import resolve_options
from kv8.errors import CapacityError
from kv8.options import EngineOptions

MIB = 2**20


class ScriptedMeter:
    """Answers like a device of 100 MiB whose weights, step and graphs take known amounts."""

    def __init__(self, *, weights: int = 30, step: int = 8, graphs: tuple[int, int] = (3, 1)):
        self.calls: list[str] = []
        # Before the step; before the graphs; after each of two graphs; all given back.
        left = 100 - weights
        self._free = [left, left, left - graphs[0], left - sum(graphs), left]
        self._step = step

    def free(self) -> int:
        self.calls.append("free")
        return self._free.pop(0) * MIB

    def forget_peak(self) -> None:
        self.calls.append("forget")

    def peak(self) -> int:
        self.calls.append("peak")
        return self._step * MIB


@pytest.fixture
def loaded(tiny_model, monkeypatch):
    """Return a loaded model and its config, served by a backend whose steps can be recorded."""
    entry = select.BackendEntry("reference", DeviceLengthsBackend, "")
    monkeypatch.setattr(select.select_backend, "__defaults__", ((entry,),))
    engine = start_engine(
        tiny_model("llama"), attention_backend="reference", max_num_seqs=4, kv_cache_memory="1MiB"
    )
    options = EngineOptions(
        model=str(tiny_model("llama")),
        attention_backend="reference",
        max_num_seqs=4,
        max_num_batched_tokens=24,
        block_size=4,
    )
    return engine.runner.model, resolve_options(options)


def fit(loaded, meter, share=0.5):
    model, config = loaded
    budget = MemoryBudget(meter, 100 * MIB, share)
    return budget.fit_cache(model, config, lambda _: OperationCapture())


def settings(config) -> dict[str, str]:
    return {decision.name: str(decision) for decision in config.decisions}


def test_the_cache_gets_what_is_left(loaded) -> None:
    config = fit(loaded, meter := ScriptedMeter(), share=0.44)
    # Less 30 of weights, 8 of the step, 3 of the largest graph and 1 of each of the other two.
    assert config.capacity.memory_bytes == int(0.44 * 100 * MIB) - (30 + 8 + 3 + 2) * MIB
    assert meter.calls == ["free", "forget", "peak", "free", "free", "free", "free"]
    text = settings(config)["kv_cache_memory"]
    for part in ("44 % of the 100.00 MiB", "30.00 MiB of weights", "8.00 MiB for the largest step"):
        assert part in text


def test_what_is_not_recorded_takes_nothing(loaded, monkeypatch) -> None:
    """A model whose steps wait for the device is served op by op, and no memory is kept for it."""
    attend = DeviceLengthsBackend.attend

    def curious(self, layer, query, batch, call):
        assert query.abs().max().item() >= 0
        return attend(self, layer, query, batch, call)

    monkeypatch.setattr(DeviceLengthsBackend, "attend", curious)
    config = fit(loaded, ScriptedMeter(graphs=(0, 0)), share=0.39)
    assert config.capacity.memory_bytes == int(0.39 * 100 * MIB) - (30 + 8) * MIB


def test_no_more_than_can_be_used(loaded) -> None:
    config = fit(loaded, ScriptedMeter(weights=10), share=0.9)
    model_len, layout = config.max_model_len, config.layout
    assert config.capacity.memory_bytes == 4 * -(-model_len // 4) * layout.block_bytes
    assert "max_num_seqs sequences of the greatest length" in settings(config)["kv_cache_memory"]


def test_the_longest_sequence_follows(loaded) -> None:
    """Pitfall 62: what is printed is what the memory that is really there holds."""
    bytes_per_token = loaded[1].layout.block_bytes // 4
    left = 200 * bytes_per_token
    meter = ScriptedMeter()
    share = (left + (30 + 8 + 5) * MIB) / (100 * MIB)
    config = fit(loaded, meter, share=share)
    assert config.max_model_len in (196, 200)  # the share is a float
    assert config.capacity.max_model_len == config.max_model_len
    assert "what fits" in settings(config)["max_model_len"]


def test_nothing_left_is_refused_with_the_sum(loaded) -> None:
    with pytest.raises(CapacityError, match=r"Nothing is left.*60.00 MiB of weights"):
        fit(loaded, ScriptedMeter(weights=60))


def test_a_step_that_does_not_fit_is_refused_with_a_remedy(loaded, monkeypatch) -> None:
    def fails(*_):
        raise torch.OutOfMemoryError("tried to allocate 3 GiB")

    monkeypatch.setattr("kv8.engine.gpu_memory.run_largest_step", fails)
    with pytest.raises(CapacityError, match="fewer max_num_batched_tokens"):
        fit(loaded, ScriptedMeter())


def test_an_amount_as_asked_needs_no_measuring(tiny_model) -> None:
    options = EngineOptions(model=str(tiny_model("llama")), kv_cache_memory="1MiB")
    assert open_budget(resolve_options(options), ScriptedMeter()) is None


def test_the_largest_step_is_as_large_as_any(loaded, monkeypatch) -> None:
    model, config = loaded
    seen = []

    class Noting:
        """A runner that notes what it is asked to compute."""

        def __init__(self):
            self.model = model

        def run(self, step):
            seen.append((step.attention.query_lens_host, len(step.input_ids), len(step.rows)))
            return torch.zeros(len(step.rows), config.geometry.vocab_size)

    run_largest_step(Noting(), config)
    assert seen == [((24,), 24, 24)]
    assert lengths_of_largest_step(config) == [24]
    long = resolve_options(
        EngineOptions(model=config.options.model, max_model_len=40, max_num_batched_tokens=100)
    )
    assert lengths_of_largest_step(long) == [40, 40, 20]
