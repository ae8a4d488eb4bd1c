"""The OpenMP runtime torch brought: native loops share it, or two pools fight for the cores."""

import ctypes
import re
from pathlib import Path
from typing import Final

import torch  # the runtime is looked for after torch has loaded it

_RUNTIME: Final = re.compile(r"lib(gomp|iomp5|omp)[-.\w]*\.(so|dylib)[.\d]*$")


def openmp_runtimes() -> list[Path]:
    """Return the OpenMP runtimes loaded in this process, in no order; empty where none can be seen.

    More than one means that torch's threads and somebody else's compete for the same cores.
    """
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    fields = (line.split(maxsplit=5) for line in maps.read_text().splitlines())
    paths = {Path(field[5]) for field in fields if len(field) == 6}
    return sorted(path for path in paths if _RUNTIME.search(path.name))


def share_openmp_runtime() -> Path | None:
    """Make the symbols of torch's runtime visible to libraries loaded from now on; return it.

    The kernels are linked without a runtime of their own: wheels of torch carry theirs under
    different names, and a name of ours would bring a second copy.
    """
    runtimes = openmp_runtimes()
    torch_folder = Path(torch.__file__).parent.parent
    runtimes.sort(key=lambda path: not path.is_relative_to(torch_folder))
    if not runtimes:
        return None
    ctypes.CDLL(str(runtimes[0]), mode=ctypes.RTLD_GLOBAL)
    return runtimes[0]
