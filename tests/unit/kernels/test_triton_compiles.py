"""The kernels compile for real GPUs, none of which has to be there, and as was meant.

What is asked of the result are the habits of fast kernels that a compiler can silently drop: FP8
codes widened two at a time, copies of 16 bytes that go on while products are made, matrix units,
no registers spilled, offsets of 64 bits. docs/gpu_kernels.md has the figures.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FP8 = "fp8_e4m3"
SHARED_KIB = {
    "sm_80": 163,
    "sm_89": 99,
    "sm_90": 227,
    "sm_100": 227,
    "gfx942": 64,
}  # the most of a program


def job(target, kind, stored_as, **options):
    name = " ".join([target, kind, stored_as, *map(str, options)])
    return {
        "name": name,
        "target": target,
        "kind": kind,
        "stored_as": stored_as,
        "options": options,
    }


JOBS = [
    job("sm_90", "store", FP8),
    job("sm_90", "decode", FP8),
    job("sm_90", "prefill", FP8, fp8_queries=True, sinks=True, window=1000, softcap=30.0),
    job("sm_89", "prefill", FP8, fp8_queries=True, fp8_values=True),
    job("sm_80", "decode", FP8, block_size=16, window=1000),
    job("sm_100", "decode", "fp8_e5m2", fp8_queries=True),
    job("sm_100", "prefill", "bfloat16", head_dim=64),
    job("gfx942", "store", FP8),
    job("gfx942", "decode", FP8, head_dim=64),
    job("gfx942", "decode", "bfloat16"),
    job("gfx942", "decode", "bfloat16", head_dim=256),
]


@pytest.fixture(scope="module")
def builds(request, tmp_path_factory):
    """What `tests.triton_compile` found, by build and kernel.

    Triton finds a build again by its kernel's source, its arguments and Triton's own files; so it
    may keep them from one run of the tests to the next.
    """
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    kept = getattr(request.config, "cache", None)
    folder = kept.mkdir("triton") if kept else tmp_path_factory.mktemp("triton")
    environment = dict(os.environ, TRITON_CACHE_DIR=str(folder))
    del environment["TRITON_INTERPRET"]
    result = subprocess.run(
        [sys.executable, "-m", "tests.triton_compile"],
        input=json.dumps(JOBS),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout)


def test_every_build_is_there(builds):
    kernels = {name.rpartition(": ")[2] for name in builds}
    assert kernels == {"store_kernel", "decode_kernel", "combine_kernel", "prefill_kernel"}
    assert {name.partition(" ")[0] for name in builds} == {j["target"] for j in JOBS}


def test_no_stride_of_blocks_or_tokens_is_multiplied_in_32_bits(builds):
    """A cache of more than 2 GiB, or a prompt of more than 2^31 values."""
    assert {name: b["narrow_strides"] for name, b in builds.items() if b["narrow_strides"]} == {}


def test_programs_fit_and_spill_nothing_in_decode(builds):
    for name, build in builds.items():
        assert build["shared"] <= SHARED_KIB[name.partition(" ")[0]] * 1024, name
        if "decode" in name and "spilled_bytes" in build:
            assert build["spilled_bytes"] == 0, name
        # In prefill, what is done for values that are no numbers spills some.
        assert build.get("spilled_bytes", 0) <= 1024, name


def test_decode_streams_codes_and_widens_them_in_pairs(builds):
    fp8 = builds[f"sm_90 decode {FP8}: decode_kernel"]
    # 32 keys of K and V, 128 bytes each, by 32 threads: 16 copies of 16 bytes, and two in advance.
    assert fp8["wide_copies"] == 3 * 16
    # Of both loops, 64 instructions for a tile of K and 64 for one of V, each two codes a thread.
    assert 2 * 128 <= fp8["pair_widenings"] <= 3 * 128
    assert 2 * 64 <= fp8["mma"] <= 3 * 64


def test_prefill_uses_the_matrix_units(builds):
    build = builds[f"sm_90 prefill {FP8} fp8_queries sinks window softcap: prefill_kernel"]
    assert build["wgmma"] > build["fp8_products"] > 0


def test_fp8_sums_end_with_their_tile(builds):
    """Pitfall 43: of weights and values as codes too, on GPUs where Triton would fuse the sums."""
    values = builds[f"sm_89 prefill {FP8} fp8_queries fp8_values: prefill_kernel"]
    assert values["fp8_products"] > 0
    assert {name: b["fp8_sums_go_on"] for name, b in builds.items() if b["fp8_sums_go_on"]} == {}


def test_only_gpus_that_have_them_are_given_fp8_instructions(builds):
    for name, build in builds.items():
        if name.startswith("sm_80"):
            assert build["pair_widenings"] == build["fp8_products"] == 0, name
