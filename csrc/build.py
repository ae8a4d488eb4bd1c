"""Compile the CPU kernels into one shared library, with any C++17 compiler and nothing else.

Run by hatch_build.py during `pip install`; by hand for other flavours:

    python csrc/build.py --output libkv8_cpu.so [--sanitize]
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "cpu"
# The same sources once for each instruction set, in a namespace of its own; dispatch.cpp chooses.
ISA_SOURCES = ("attend.cpp", "store.cpp", "linear.cpp", "elementwise.cpp")
ISA_FLAGS = {
    "plain": [],
    "avx2": ["-mavx2", "-mfma"],
    "avx512": [
        *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vbmi")),
        *("-mfma", "-mprefer-vector-width=512"),
    ],
}
# Where a sum follows a product, both are rounded, as torch's separate operations do.
SOURCE_FLAGS = {
    source: ["-ffp-contract=off"] for source in ("elementwise.cpp", "linear_amx_many.cpp")
}
# Dot products and tiles of bfloat16, where compiler and system know them: variants of some sources
# of the avx512 build, entered only on a CPU that has the unit.
BF16_FLAGS = [*ISA_FLAGS["avx512"], "-mavx512bf16"]
AMX_SOURCES = ("attend.cpp", "linear_amx.cpp", "linear_amx_many.cpp", "linear_amx_one.cpp")
AMX_FLAGS = [*BF16_FLAGS, "-mamx-tile", "-mamx-bf16"]
# No flag here lets a compiler reorder sums or forget about NaN; these two only let it ignore errno
# and floating-point exception flags, which nobody reads.
FLAGS = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math"]
WARNINGS = ["-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]  # see below
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g"]
# GCC 12's own AVX-512 headers initialise a variable with itself (GCC bug 105593).


class BuildError(Exception):
    """The kernels could not be built; the message is the reason."""


def find_compiler() -> str:
    """Return the C++ compiler: $CXX, or the first that is installed."""
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")):
        found = shutil.which(name)
        if found:
            return found
    raise BuildError("no C++ compiler was found (looked for $CXX, c++, g++, clang++)")


def build(output: Path, *, sanitize: bool = False) -> None:
    """Write the library to ``output``; raises `BuildError`."""
    compiler = find_compiler()
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    flags = [*FLAGS, *WARNINGS, *(["-O1", *SANITIZE] if sanitize else ["-O3"])]
    with tempfile.TemporaryDirectory() as folder:
        flags += _openmp_flags(compiler, Path(folder))
        target_flags = ["-DKV8_X86"] if x86 else []
        bf16 = x86 and _compiles(compiler, BF16_FLAGS, Path(folder))
        amx = bf16 and sys.platform == "linux" and _compiles(compiler, AMX_FLAGS, Path(folder))
        flags += [f"-DKV8_{unit}" for unit, there in (("BF16", bf16), ("AMX", amx)) if there]
        jobs = [(f"{name}.cpp", f"{name}.o", target_flags) for name in ("dispatch", "step")]
        for isa, isa_flags in ISA_FLAGS.items():
            if isa == "plain" or x86:
                for source in ISA_SOURCES:
                    target = f"{Path(source).stem}-{isa}.o"
                    source_flags = SOURCE_FLAGS.get(source, [])
                    jobs.append((source, target, [f"-DKV8_ISA={isa}", *isa_flags, *source_flags]))
        if bf16:
            bf16_flags = ["-DKV8_ISA=avx512bf16", *BF16_FLAGS]
            jobs.append(("attend.cpp", "attend-avx512bf16.o", bf16_flags))
        if amx:
            for source in AMX_SOURCES:
                target = f"{Path(source).stem}-amx.o"
                source_flags = SOURCE_FLAGS.get(source, [])
                jobs.append((source, target, ["-DKV8_ISA=amx", *AMX_FLAGS, *source_flags]))

        def compile_one(job: tuple[str, str, list[str]]) -> str:
            source, target, more = job
            path = str(Path(folder) / target)
            _run([compiler, *flags, *more, "-c", str(SOURCES / source), "-o", path])
            return path

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, jobs))
        # Linked without an OpenMP runtime: it uses the one torch loads (kv8.kernels.openmp).
        link = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
        linked = Path(folder) / output.name
        options = ["-shared", *(SANITIZE if sanitize else []), *link]
        _run([compiler, *options, *objects, "-o", str(linked)])
        output.parent.mkdir(parents=True, exist_ok=True)
        # Never write into a file that a running process has mapped.
        partial = output.with_suffix(".partial")
        shutil.copy(linked, partial)
        partial.replace(output)


def _openmp_flags(compiler: str, folder: Path) -> list[str]:
    """Return the flag for OpenMP, or none where the compiler has no OpenMP: then one thread."""
    include = "#include <omp.h>\nint n() { return omp_get_max_threads(); }\n"
    if _compiles(compiler, ["-fopenmp"], folder, include):
        return ["-fopenmp"]
    return ["-Wno-unknown-pragmas"]


def _compiles(compiler: str, flags: list[str], folder: Path, source: str = "") -> bool:
    """Whether the compiler takes these flags and compiles a small source with them."""
    probe = folder / "probe.cpp"
    probe.write_text(source)
    try:
        _run([compiler, *flags, "-c", str(probe), "-o", str(folder / "probe.o")])
    except BuildError:
        return False
    return True


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{done.stderr.strip()}")


def main() -> None:
    """Build from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--sanitize", action="store_true", help="address and undefined behaviour")
    arguments = parser.parse_args()
    try:
        build(arguments.output, sanitize=arguments.sanitize)
    except BuildError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
