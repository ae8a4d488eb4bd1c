"""A short run of the fuzzer, so that it and the server's document stay sound; see tests/fuzzing."""

from tests.fuzzing import fuzz
from tests.served import serving
from tests.tiny_models import TinyModel


def test_requests_made_from_the_document_get_answers_it_describes(tiny_model: TinyModel) -> None:
    with serving(tiny_model(), max_model_len=128) as served:
        # Every border of every field. Making requests up at random takes longer for much less.
        words = ("--phases", "coverage", "--generation-deterministic", "--workers", 2)
        run = fuzz(served, *words, most_tokens=3)
        assert run.returncode == 0, run.stdout + run.stderr
        served.until(lambda: served.state.engine.is_idle)
        assert served.blocks_in_use() == 0
        assert served.on_engine(lambda engine: engine.counters.failed_steps) == 0
