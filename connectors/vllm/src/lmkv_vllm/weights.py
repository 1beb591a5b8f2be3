"""Which weights these are: a fingerprint of the files they were loaded from, taken once when the engine starts.

A file of a hub's cache is named by its content. Of any other file name, size, time of change and a sample of the
content are taken: images that are built reproducibly give all files one time, and a fine-tune of the same architecture
has the same names and sizes. A folder copied without its times (`cp` instead of `cp -a`) counts as other weights: a
miss, not a wrong hit.

What cannot be told (an object store, a hub that has no cache we know, nothing that looks like weights) is named by a
random word: it is equal to itself in this process, and to nothing anywhere else.
"""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".npcache", ".tensors")
HEAD: Final = 1 << 16
"""Bytes at the start of a file that are looked at whole: the table of tensors lies there."""
SLICE: Final = 4096
SLICES: Final = 256
"""Slices of a file that are looked at, evenly spread: up to 1 MiB after its head, that is all of it."""
_READERS: Final = 8
_CONTENT_NAME: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""A blob of a hub's cache is named by its git or SHA-256 hash."""


def unknown() -> str:
    """A word for what cannot be told; no other call gives the same."""
    return f"unknown-{uuid.uuid4().hex}"


def model_folder(name: str, revision: str = "", download_dir: str | None = None) -> Path | None:
    """The local folder of a model: itself a folder, or its snapshot in the hub's cache. None: it is not here."""
    path = Path(name).expanduser()
    if name and path.exists():
        return path if path.is_dir() else path.parent
    if not name or modelscope():  # a repository of that name on the other hub is another one
        return None
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415  only for hub ids; comes with vLLM
    except ImportError:
        return None
    try:
        return Path(snapshot_download(name, revision=revision or None, cache_dir=download_dir, local_files_only=True))
    except (OSError, ValueError):  # not in the cache, or not the name of a repository
        return None


def modelscope() -> bool:
    """Whether vLLM takes names of repositories for ModelScope's."""
    return os.environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() in {"1", "true"}


def files_fingerprint(folder: Path | None, suffixes: Iterable[str] = WEIGHTS) -> str | None:
    """Digest over the files of `folder` with these suffixes; None when there are none, or they cannot be read."""
    wanted = tuple(suffixes)
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix in wanted) if folder is not None else []
        if not paths:
            return None
        with ThreadPoolExecutor(_READERS, "lmkv-weights") as readers:
            lines = list(readers.map(_line, paths))
    except OSError:
        return None
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]


def _line(path: Path) -> str:
    real = path.resolve()
    stat = real.stat()
    if path.is_symlink() and real.parent.name == "blobs" and _CONTENT_NAME.fullmatch(real.name):
        content = real.name
    else:
        content = f"{stat.st_mtime_ns}\0{_sample(real, stat.st_size)}"
    return f"{path.name}\0{stat.st_size}\0{content}\n"


def _sample(path: Path, nbytes: int) -> str:
    """Digest over the head of a file, its end, and slices in between."""
    sha = hashlib.sha256()
    step = max(SLICE, (nbytes - HEAD) // SLICES)
    with path.open("rb", buffering=0) as file:
        fd = file.fileno()
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no more is read than is asked for
        sha.update(os.pread(fd, HEAD, 0))
        for offset in range(HEAD, nbytes, step):
            sha.update(os.pread(fd, SLICE, offset))
        sha.update(os.pread(fd, SLICE, max(0, nbytes - SLICE)))
    return sha.hexdigest()
