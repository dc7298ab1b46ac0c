"""What this machine lets us have: CPUs and memory, as affinity and containers bound them.

A process is in a group of every hierarchy of control groups, and each group above that one may
bound it too, so all of them are asked. Version 2 has one hierarchy, version 1 one for each
controller; both may be mounted at once. In a container the path of our group may be one of the
host, which is not there: then what is mounted is ours.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
PROC = Path("/proc")

_NO_LIMIT = 1 << 60
"""Version 1 says "no limit" with a number about as large as it can."""
_FEW_CPUS = 3
"""From here on one CPU is left to sockets and text."""

logger = logging.getLogger(__name__)


# -- CPUs -------------------------------------------------------------------------------------


def usable_cpus(root: Path = CGROUP, proc: Path = PROC) -> int:
    """CPUs we may use at once: the affinity mask, or less where a quota says so; at least 1.

    A part of a CPU is rounded down: a thread too many spends the quota waiting for the others,
    and then all of them are stopped.
    """
    cpus = len(os.sched_getaffinity(0))
    quota = cpu_quota(root, proc)
    return max(1, min(cpus, int(quota))) if quota is not None else cpus


def compute_threads(root: Path = CGROUP, proc: Path = PROC) -> int:
    """Threads to compute with: ``OMP_NUM_THREADS`` where it is set, else the usable CPUs, less one
    for the API process from three on.
    """
    preset = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if preset.isdigit() and int(preset) > 0:
        return int(preset)
    cpus = usable_cpus(root, proc)
    return cpus - 1 if cpus >= _FEW_CPUS else cpus


def cpu_quota(root: Path = CGROUP, proc: Path = PROC) -> float | None:
    """The tightest CPU quota on us, in CPUs; None without one."""
    quotas: list[float] = []
    for group in _groups_v2(root, proc):
        limit, _, period = (_read(group / "cpu.max") or "").partition(" ")
        quotas += _ratio(limit, period)
    for group in _groups_v1(root, proc, "cpu"):
        files = (group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us")
        quotas += _ratio(*(_read(file) or "" for file in files))
    return min(quotas, default=None)


def cpu_flags() -> frozenset[str]:
    """The instruction sets the kernel reports, in its names."""
    text = _read(PROC / "cpuinfo") or ""
    for line in text.splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(flags.split())
    return frozenset()


# -- memory -----------------------------------------------------------------------------------


def memory_limit(root: Path = CGROUP, proc: Path = PROC) -> int | None:
    """The tightest memory limit on us in bytes, None without one.

    ``memory.high`` counts: above it a group is not killed, but brought to a crawl.
    """
    return min((limit for limit, _ in _memory_bounds(root, proc)), default=None)


def available_memory(root: Path = CGROUP, proc: Path = PROC) -> int:
    """Bytes that could be taken now without swapping or hitting a group's limit."""
    import psutil

    room = [int(psutil.virtual_memory().available)]
    room += [limit - used for limit, used in _memory_bounds(root, proc)]
    return max(0, min(room))


def total_memory(root: Path = CGROUP, proc: Path = PROC) -> int:
    """Bytes of memory we could have at the very most: the machine's, or a group's limit."""
    import psutil

    total = int(psutil.virtual_memory().total)
    return min(total, memory_limit(root, proc) or total)


def _memory_bounds(root: Path, proc: Path) -> Iterator[tuple[int, int]]:
    """``(limit, used)`` of every group that bounds us. File pages that the kernel can drop when
    somebody needs the room are not used: else a model read once would count twice.
    """
    for group in _groups_v2(root, proc):
        limits = [_number(_read(group / name)) for name in ("memory.max", "memory.high")]
        given = [limit for limit in limits if limit is not None]
        if given:
            yield min(given), _used(group, "memory.current", "inactive_file")
    for group in _groups_v1(root, proc, "memory"):
        limit = _number(_read(group / "memory.limit_in_bytes"))
        if limit is not None and limit < _NO_LIMIT:
            yield limit, _used(group, "memory.usage_in_bytes", "total_inactive_file")


def _used(group: Path, name: str, droppable: str) -> int:
    used = _number(_read(group / name)) or 0
    for line in (_read(group / "memory.stat") or "").splitlines():
        key, _, value = line.partition(" ")
        if key == droppable:
            used -= _number(value) or 0
    return max(0, used)


# -- control groups ---------------------------------------------------------------------------


def _own_groups(proc: Path) -> dict[str, str]:
    """Our group in each hierarchy, by controller; version 2's by the empty name."""
    own: dict[str, str] = {}
    for line in (_read(proc / "self" / "cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            own[controller] = path
    return own


def _groups_v2(root: Path, proc: Path) -> Iterator[Path]:
    """Our group and all above it. Beside version 1, version 2 is mounted one level down."""
    base = root / "unified" if (root / "unified").is_dir() else root
    yield from _upwards(base, _own_groups(proc).get("", "/"))


def _groups_v1(root: Path, proc: Path, controller: str) -> Iterator[Path]:
    """Our group of a controller and all above it. Controllers may share a hierarchy, whose folder
    is called by all of them.
    """
    own = _own_groups(proc).get(controller, "/")
    try:
        folders = sorted(path for path in root.iterdir() if controller in path.name.split(","))
    except OSError:
        return
    for folder in folders[:1]:
        yield from _upwards(folder, own)


def _upwards(base: Path, path: str) -> Iterator[Path]:
    parts = [part for part in path.split("/") if part and part not in (".", "..")]
    for count in range(len(parts), -1, -1):
        yield base.joinpath(*parts[:count])


def _ratio(limit: str, period: str) -> list[float]:
    """The quota of a group; none where it says so, or says nothing we understand."""
    over, under = _number(limit), _number(period)
    return [over / under] if over and under and over > 0 and under > 0 else []


def _number(text: str | None) -> int | None:
    try:
        return int(text) if text else None
    except ValueError:  # "max", or a format of a kernel to come
        return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        logger.debug("%s: %s", path, error)
        return None
