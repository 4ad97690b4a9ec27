"""How much memory a process can still take: of the machine, of its cgroups, of its address space."""

import resource
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# Of cgroups of version 2 and 1: the limit, the use, and in memory.stat what of the use can be had at once.
FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_memory(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Bytes: the least of what the machine has available, what each cgroup around this process leaves, and what
    RLIMIT_AS leaves. A limit that cannot be read counts as none."""
    fields = (line.split() for line in (proc / "meminfo").read_text().splitlines())
    available = next(int(values[0]) * 1024 for name, *values in fields if name == "MemAvailable:")
    left = [available, *(room for folder in cgroups_of(proc, cgroups) if (room := room_in(folder)) is not None)]
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        num_pages = int((proc / "self" / "statm").read_text().split()[0])
        left.append(limit - num_pages * resource.getpagesize())
    return max(min(left), 0)


def cgroups_of(proc: Path, cgroups: Path) -> list[Path]:
    """The folders of the memory cgroups around this process, from the inside out."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root = cgroups / controllers
            own = root / path.lstrip("/")
            # Within a container the path may be that of the host; then the root is what the container has.
            folders += [each for each in (own, *own.parents) if each == root or root in each.parents]
    return folders


def room_in(folder: Path) -> int | None:
    """Bytes that a cgroup leaves; None if it has no limit."""
    for limit, use, inactive in FILES:
        try:
            most, used = int((folder / limit).read_text()), int((folder / use).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            return most - used + int(stat.get(inactive, 0))
        except (OSError, ValueError):  # there is no such file, or it says "max"
            continue
    return None
