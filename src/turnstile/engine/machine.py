"""What this machine lets us have: CPUs and memory, as affinity and containers bound them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def usable_cpus(root: Path = CGROUP) -> int:
    """CPUs we may use at once: the affinity mask, or less where a quota says so; at least 1."""
    cpus = len(os.sched_getaffinity(0))
    quota = cpu_quota(root)
    return max(1, min(cpus, int(quota))) if quota is not None else cpus


def cpu_quota(root: Path = CGROUP) -> float | None:
    """The container's CPU quota in CPUs (cgroup v2, then v1), None without one."""
    quotas: list[float] = []
    for text in _read_all(root, "cpu.max"):
        limit, _, period = text.partition(" ")
        if limit != "max" and period:
            quotas.append(int(limit) / int(period))
    v1 = root / "cpu"
    v1_limit, v1_period = _read(v1 / "cpu.cfs_quota_us"), _read(v1 / "cpu.cfs_period_us")
    if v1_limit and v1_period and int(v1_limit) > 0:
        quotas.append(int(v1_limit) / int(v1_period))
    return min(quotas, default=None)


def memory_limit(root: Path = CGROUP) -> int | None:
    """The container's memory limit in bytes, None without one."""
    limits = [int(text) for text in _read_all(root, "memory.max") if text != "max"]
    v1 = _read(root / "memory" / "memory.limit_in_bytes")
    if v1 and int(v1) < 1 << 60:
        limits.append(int(v1))
    return min(limits, default=None)


def available_memory(root: Path = CGROUP) -> int:
    """Bytes that could be taken now without swapping or hitting the container's limit."""
    import psutil

    available = int(psutil.virtual_memory().available)
    limit = memory_limit(root)
    if limit is None:
        return available
    used = next((int(text) for text in _read_all(root, "memory.current")), 0)
    return max(0, min(available, limit - used))


def cpu_flags() -> frozenset[str]:
    """The instruction sets the kernel reports, in its names."""
    text = _read(Path("/proc/cpuinfo")) or ""
    for line in text.splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(flags.split())
    return frozenset()


def _read_all(root: Path, name: str) -> Iterator[str]:
    """A cgroup v2 file of our group and of all groups above it: each may bound us."""
    group = root
    for line in (_read(Path("/proc/self/cgroup")) or "").splitlines():
        if line.startswith("0::"):
            group = root / line[3:].lstrip("/")
    while True:
        text = _read(group / name)
        if text:
            yield text
        if group == root or root not in group.parents:
            return
        group = group.parent


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
