"""Cases of kind f: threads and memory as containers bound them, processes that stay out of each
other's way, and a server that does nothing while there is nothing to do.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from e2e.harness import ServerProcess
from turnstile.engine import machine
from turnstile.engine.worker import _offer_to_oom_killer

NUM_CPUS = 8
GIB = 2**30


class Machine:
    """A machine made of files: ``/proc/self/cgroup`` and what is mounted at /sys/fs/cgroup."""

    def __init__(self, path: Path) -> None:
        self.root, self.proc = path / "cgroup", path / "proc"
        self.root.mkdir()

    def member_of(self, *lines: str) -> None:
        self.put(self.proc / "self/cgroup", "\n".join(lines) + "\n")

    def put(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def group(self, path: str, **files: object) -> None:
        """Files of a group: ``cpu_max="150000 100000"`` is ``cpu.max``."""
        for name, text in files.items():
            self.put(self.root / path / name.replace("_", ".", 1), f"{text}\n")

    @property
    def cpus(self) -> int:
        return machine.usable_cpus(self.root, self.proc)

    @property
    def quota(self) -> float | None:
        return machine.cpu_quota(self.root, self.proc)

    @property
    def limit(self) -> int | None:
        return machine.memory_limit(self.root, self.proc)

    @property
    def available(self) -> int:
        return machine.available_memory(self.root, self.proc)

    @property
    def threads(self) -> int:
        return machine.compute_threads(self.root, self.proc)


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(NUM_CPUS)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return Machine(tmp_path)


def test_b105_without_groups_the_affinity_counts(box: Machine) -> None:
    assert box.cpus == NUM_CPUS
    assert box.quota is None
    assert box.limit is None
    box.member_of("0::/")
    assert box.cpus == NUM_CPUS


@pytest.mark.parametrize(
    ("quota", "cpus"),
    [("400000 100000", 4), ("150000 100000", 1), ("50000 100000", 1), ("199999 100000", 1),
     ("max 100000", NUM_CPUS), ("1600000 100000", NUM_CPUS), ("30000 10000", 3)],
)  # fmt: skip
def test_b105_a_quota_of_version_2_is_rounded_down(box: Machine, quota: str, cpus: int) -> None:
    box.member_of("0::/")
    box.group("", cpu_max=quota)
    assert box.cpus == cpus


@pytest.mark.parametrize(
    ("quota", "cpus"), [("400000", 4), ("150000", 1), ("-1", NUM_CPUS), ("0", NUM_CPUS)]
)
@pytest.mark.parametrize("folder", ["cpu", "cpu,cpuacct"])
def test_b105_a_quota_of_version_1(box: Machine, folder: str, quota: str, cpus: int) -> None:
    box.member_of(f"4:{folder}:/", "0::/")
    files = {"cpu_cfs_quota_us": quota, "cpu_cfs_period_us": "100000"}
    box.group(folder, **files)
    assert box.cpus == cpus


def test_b105_the_tightest_of_nested_groups_counts(box: Machine) -> None:
    box.member_of("0::/slice/service/payload")
    box.group("slice", cpu_max="600000 100000", memory_max=8 * GIB)
    box.group("slice/service", cpu_max="200000 100000", memory_max="max", memory_high=3 * GIB)
    box.group("slice/service/payload", cpu_max="max 100000", memory_max=4 * GIB)
    box.group("other", cpu_max="100000 100000", memory_max=GIB)
    assert box.quota == 2
    assert box.limit == 3 * GIB


def test_b105_nested_groups_of_version_1(box: Machine) -> None:
    box.member_of("7:memory:/docker/abc", "4:cpu,cpuacct:/docker/abc", "0::/")
    inner = {"cpu_cfs_quota_us": "-1", "cpu_cfs_period_us": "100000"}
    outer = {"cpu_cfs_quota_us": "250000", "cpu_cfs_period_us": "100000"}
    box.group("cpu,cpuacct/docker/abc", **inner)
    box.group("cpu,cpuacct/docker", **outer)
    box.group("memory/docker/abc", memory_limit_in_bytes=2 * GIB)
    box.group("memory", memory_limit_in_bytes=9223372036854771712)
    assert box.quota == 2.5
    assert box.limit == 2 * GIB


# In a container the path may be the host's; what is mounted is the container's own group.
def test_b105_a_path_of_the_host_still_finds_what_is_mounted(box: Machine) -> None:
    box.member_of("0::/system.slice/docker-abc.scope")
    box.group("", cpu_max="200000 100000", memory_max=GIB)
    assert box.cpus == 2
    assert box.limit == GIB
    box.member_of("0::/../../elsewhere")
    assert box.cpus == 2


def test_b105_both_versions_at_once(box: Machine) -> None:
    box.member_of("4:cpu:/a", "7:memory:/a", "0::/b")
    box.group("unified/b", cpu_max="300000 100000", memory_max=5 * GIB)
    files = {"cpu_cfs_quota_us": "500000", "cpu_cfs_period_us": "100000"}
    box.group("cpu/a", **files)
    box.group("memory/a", memory_limit_in_bytes=4 * GIB)
    assert box.quota == 3
    assert box.limit == 4 * GIB


@pytest.mark.parametrize("text", ["", "nonsense", "max", "1 2 3", "100000 0", "-5 100000", "1e5 x"])
def test_b105_what_cannot_be_understood_is_no_limit(box: Machine, text: str) -> None:
    box.member_of("0::/")
    box.group("", cpu_max=text, memory_max=text)
    assert box.cpus == NUM_CPUS
    assert box.limit is None


def test_b105_one_cpu_is_left_to_the_api_process_from_three_on(
    box: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cpus, threads in ((1, 1), (2, 2), (3, 2), (8, 7)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=cpus: set(range(n)))
        assert box.threads == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert box.threads == 5
    for nonsense in ("", "0", "many", "-2"):
        monkeypatch.setenv("OMP_NUM_THREADS", nonsense)
        assert box.threads == 7


def test_b105_memory_is_what_the_groups_leave(box: Machine) -> None:
    free = psutil.virtual_memory().available
    box.member_of("0::/a/b")
    box.group("a", memory_max=free + GIB, memory_current=GIB // 2)
    # The group leaves half a GiB more than the machine has, which others change as we look.
    assert box.available <= free + GIB // 4
    stat = f"anon 5\ninactive_file {40 * 2**20}\nactive_file 7"
    box.group("a/b", memory_max=100 * 2**20, memory_current=60 * 2**20, memory_stat=stat)
    assert box.available == 80 * 2**20, "pages of files the kernel can drop are not used"
    box.group("a", memory_max=50 * 2**20, memory_current=70 * 2**20)
    assert box.available == 0


# -- with a server ----------------------------------------------------------------------------


def start_on(cpu: int, model: Path) -> ServerProcess:
    """A server that may use one CPU only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        return ServerProcess(model, num_pages=64, max_num_seqs=8)
    finally:
        os.sched_setaffinity(0, before)


@pytest.fixture(scope="module")
def pinned(tiny: Path) -> Iterator[ServerProcess]:
    with start_on(min(os.sched_getaffinity(0)), tiny) as server:
        yield server
        server.check()


def processes(server: ServerProcess) -> list[psutil.Process]:
    parent = psutil.Process(server.process.pid)
    return [parent, *parent.children(recursive=True)]


def check_stays_on(server: ServerProcess, cpu: int) -> None:
    assert server.http.get("/server_info").json()["engine"]["threads"] == 1
    server.gather([lambda k=k: server.complete([5 + k] * 30, max_tokens=30) for k in range(8)])
    both = processes(server)
    assert len(both) >= 2
    for process in both:
        for thread in process.threads():
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                assert os.sched_getaffinity(thread.id) == {cpu}, process


# B105: threads from the affinity. B107: never a thread outside the mask that we were given, so
# that two servers with a CPU each do not meet.
@pytest.mark.e2e
def test_b105_b107_pinned_servers_stay_on_their_cpus(pinned: ServerProcess, tiny: Path) -> None:
    first, *others = sorted(os.sched_getaffinity(0))
    check_stays_on(pinned, first)
    if others:
        with start_on(others[0], tiny) as neighbour:
            check_stays_on(neighbour, others[0])
            check_stays_on(pinned, first)


# B109: connections that do nothing and scrapers cost the streams nothing but their own time.
@pytest.mark.e2e
def test_b109_idle_connections_and_a_scraper_disturb_nobody(pinned: ServerProcess) -> None:
    import socket

    port = int(pinned.url.rpartition(":")[2])
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
    try:
        body: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}
        calls = [lambda k=k: pinned.complete([5 + k] * 500, **body) for k in range(4)]
        calls += [lambda: pinned.http.get("/health").status_code for _ in range(20)]
        calls += [lambda: pinned.http.get("/metrics").status_code for _ in range(5)]
        answers = pinned.gather(calls)
        assert [status for status, _ in answers[:4]] == [200] * 4
        assert set(answers[4:]) == {200}
    finally:
        for connection in idle:
            connection.close()


# Good manners: a server that has served and has nothing to do does nothing.
@pytest.mark.e2e
def test_an_idle_server_uses_no_cpu(pinned: ServerProcess) -> None:
    pinned.complete([5] * 10, max_tokens=5)
    pinned.idle()
    time.sleep(1.0)
    both = processes(pinned)

    def used() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in both)

    before = used()
    time.sleep(2.0)
    assert used() - before <= 0.04, "two ticks of the clock in two seconds"


@pytest.mark.parametrize(("inherited", "own"), [(0, 500), (300, 800), (900, 1000), (-500, 0)])
def test_the_engine_offers_itself_above_whatever_the_container_set(
    tmp_path: Path, inherited: int, own: int
) -> None:
    file = tmp_path / "oom_score_adj"
    file.write_text(f"{inherited}\n")
    _offer_to_oom_killer(file)
    assert int(file.read_text()) == own
    _offer_to_oom_killer(tmp_path / "not there")


@pytest.mark.e2e
def test_when_memory_runs_out_the_engine_goes_first(pinned: ServerProcess) -> None:
    parent, *children = processes(pinned)
    engine = pinned.engine_pid
    assert engine in [child.pid for child in children]

    def adjustment(pid: int) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    assert adjustment(engine) > adjustment(parent.pid)
