"""One process of serve_load.py: a server, or an `LLM` that does the same work without one.

    python serve_process.py server|offline '{"model": ..., "options": {...}, ...}'

The server runs until SIGTERM and then, without a request left, looks into its engine. The `LLM`
reads the number of a round from each line of standard input, and generates that round's work.
Both write JSON, a line for each event.
"""

import json
import sys
import time
from typing import Any

from serve_work import round_of_work

from kv8.calibration.start_up import start_engine
from kv8.engine.engine import Engine
from kv8.llm import LLM
from kv8.options import EngineOptions
from kv8.sampling_params import SamplingParams
from kv8.server import run
from kv8.server.settings import ServerSettings


def tell(**event: Any) -> None:
    """Write an event."""
    print(json.dumps(event), flush=True)


def serve(settings: dict[str, Any]) -> int:
    """Serve; at the end, tell what the engine still holds, which should be nothing."""
    engines: list[Engine] = []

    def start(options: EngineOptions) -> Engine:  # remembers the engine, to be looked into
        engines.append(start_engine(options))
        return engines[-1]

    options = EngineOptions(model=settings["model"], **settings["options"])
    server = ServerSettings(port=0, **settings["server"])
    code = run.serve(options, server, say=lambda line: tell(said=line), make_engine=start)
    [engine] = engines
    engine.check_invariants()
    cache = engine.cache
    tell(
        invariants="hold",
        unfinished=engine.has_unfinished,
        used_blocks=cache.num_blocks - cache.num_free_blocks,
        preemptions=engine.num_preemptions,
        failed_steps=engine.counters.failed_steps,
        finished=engine.counters.finished,
    )
    return code


def generate(settings: dict[str, Any]) -> int:
    """Generate a round of work for each line read, and tell how long it took."""
    with LLM(settings["model"], **settings["options"]) as llm:
        vocab_size = llm.engine.config.geometry.vocab_size
        tell(ready=True)
        for line in sys.stdin:
            work = round_of_work(settings["seed"], int(line), settings["count"], vocab_size)
            params = [
                SamplingParams(temperature=0, max_tokens=one.max_tokens, ignore_eos=True)
                for one in work
            ]
            begin = time.perf_counter()
            outputs = llm.generate([one.prompt for one in work], params, use_tqdm=False)
            seconds = time.perf_counter() - begin
            tell(seconds=seconds, tokens=sum(len(o.outputs[0].token_ids) for o in outputs))
    return 0


if __name__ == "__main__":
    role, text = sys.argv[1:]
    sys.exit((serve if role == "server" else generate)(json.loads(text)))
