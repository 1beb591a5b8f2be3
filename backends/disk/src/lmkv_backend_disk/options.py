"""The `options:` of a tier with `backend: disk`."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path  # noqa: TC003  pydantic needs it when the module is imported
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

if TYPE_CHECKING:
    from lmkv.specs import BackendContext


class DiskOptions(BaseModel):
    """One directory, owned by one process at a time."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Path = Field(description="Directory of the frames, absolute; `~` is the home directory. One tier owns it.")
    fsync: Literal["never", "publish"] = Field(
        default="never",
        description="`publish` flushes each frame before it becomes visible. `never`: a power cut may cost frames, "
        "never hand out wrong ones, because every load is verified.",
    )
    io: Literal["threads", "aiofiles"] = Field(
        default="threads", description="Who reads and writes: the tier's threads themselves, or aiofiles on a loop."
    )
    direct: Literal["auto", "off"] = Field(
        default="auto", description="`auto` by-passes the page cache (O_DIRECT) where the file system takes it."
    )
    create_parents: bool = Field(default=False, description="Create missing parent directories of `path`.")

    @field_validator("path")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        path = value.expanduser()
        if not path.is_absolute():
            raise ValueError(f"{str(value)!r} is relative: which directory it means would depend on who starts lmkv")
        return path

    def check(self, context: BackendContext) -> list[str]:
        """What would stop the tier from starting, found without creating anything."""
        existing = self.path
        try:
            while not os.path.lexists(existing):
                existing = existing.parent
            if not stat.S_ISDIR(existing.stat().st_mode):
                return [f"path: {existing} is no directory ([Errno {errno.ENOTDIR}])"]
        except OSError as e:
            return [f"path: cannot look at {existing}: {e}"]
        if existing not in {self.path, self.path.parent} and not self.create_parents:
            missing = self.path.parent
            return [f"path: {missing} does not exist ([Errno 2]); create it, or set create_parents: true"]
        faults = []
        if not os.access(existing, os.W_OK | os.X_OK):
            code = errno.EROFS if os.statvfs(existing).f_flag & os.ST_RDONLY else errno.EACCES
            faults.append(f"path: {existing} is not writable for this user ([Errno {code}])")
        if context.capacity is not None:
            faults += self._space(existing, context.capacity)
        return faults

    def _space(self, existing: Path, capacity: int) -> list[str]:
        from lmkv_backend_disk.trailers import generation_bytes  # noqa: PLC0415  options import nothing of the backend

        log = 2 * generation_bytes(capacity)
        system = os.statvfs(existing)
        free = system.f_bavail * system.f_frsize
        if capacity + log <= free:
            return []
        free += _used(self.path, "frames", "trailers", "trailers.old", "trailers.uses", "trailers.uses.old")
        if capacity + log <= free:
            return []
        wanted = f"{capacity / 2**30:.2f} GiB and at most {log / 2**30:.2f} GiB for the log of trailers"
        return [f"capacity: {wanted}, but {existing} has room for {free / 2**30:.2f} GiB"]


def _used(root: Path, *names: str) -> int:
    """Bytes on disk of these files and folders below `root`, as far as they are there."""
    places = [os.path.join(root, name) for name in names]
    files = [path for path in places if os.path.isfile(path)]
    files += [os.path.join(parent, name) for place in places for parent, _, names in os.walk(place) for name in names]
    return sum(os.lstat(path).st_blocks * 512 for path in files)
