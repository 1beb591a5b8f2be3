"""How much memory can be allocated: what the kernel says is available, bounded by the control group's limit."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_ROOT: Final = Path("/")
_UNLIMITED: Final = 1 << 60
"""Version 1 of control groups writes a number above this for *no limit*."""


def available_memory(root: Path = _ROOT) -> int:
    """Bytes. `root` replaces ``/`` in tests."""
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            break
    else:
        available = 0
    return max(0, min([available, *_group_room(root)]))


def _group_room(root: Path) -> list[int]:
    """Bytes left below the limit of each control group that this process is in, from its own up to the root."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    room = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            mount, limit, usage = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            mount, limit, usage = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = mount / group.lstrip("/")
        # In a container the group's path may be the host's: then only the mount itself can be seen.
        for place in (folder, *folder.parents):
            left = _left(place, limit, usage)
            if left is not None:
                room.append(left)
            if place == mount:
                break
    return room


def _left(place: Path, limit_file: str, usage_file: str) -> int | None:
    try:
        limit = (place / limit_file).read_text().strip()
        if limit == "max" or int(limit) >= _UNLIMITED:
            return None
        used = int((place / usage_file).read_text())
        # Cached file pages count as used, but give way.
        stat = dict(line.split(" ", 1) for line in (place / "memory.stat").read_text().splitlines())
        return int(limit) - used + int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        return None
