"""What the script runs, in order: first whether it is right, then how fast it is."""

from benchmarks.gpu import (
    correctness,
    engines,
    environment,
    kernel_table,
    long_context,
    peer,
    whole,
)
from benchmarks.gpu.sections import Section

SECTIONS: dict[str, Section] = {
    "environment": Section(environment.body, 0, "Machine, versions, measured roofs", most=40),
    "correctness": Section(
        correctness.body, 20, "Every kernel, format and head layout against the reference"
    ),
    "long_context": Section(long_context.body, 5, "Sums over 65,536 keys", most=40),
    "engines": Section(
        engines.body, 20, "Graph and eager, changed scales, two engines in one process", most=60
    ),
    "kernels": Section(
        kernel_table.body, 20, "Decode, prefill and store against the roofs", most=70
    ),
    "whole_engine": Section(
        whole.body, 50, "A model of Llama-3.1-8B's shape with random weights, decoding"
    ),
    "peer": Section(peer.body, 0, "The same work in transformers' generate_batch"),
}
