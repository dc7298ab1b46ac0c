"""The alerts, ``/metrics`` and the dashboard, tried with Prometheus where it is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import try_dashboard
import yaml

from deploy.proxies import replaced
from e2e.harness import FAKED, ROOT, ServerProcess, free_port

HERE = ROOT / "deploy/prometheus"


def promtool(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    binary = shutil.which("promtool")
    if binary is None:
        pytest.skip("promtool is not installed here")
    return subprocess.run(
        [binary, *arguments], cwd=HERE, input=text, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip


def alerts() -> set[str]:
    groups = yaml.safe_load((HERE / "alerts.yml").read_text())["groups"]
    return {rule["alert"] for group in groups for rule in group["rules"]}


def test_every_alert_has_a_story_in_which_it_fires() -> None:
    stories = yaml.safe_load((HERE / "alerts_test.yml").read_text())["tests"]
    told = {
        name
        for story in stories
        for check in story["promql_expr_test"]
        for sample in check["exp_samples"]
        for name in re.findall(r'alertname="(\w+)"', sample["labels"])
    }
    assert told == alerts()


def test_the_alerts_fire_when_they_should_and_not_before() -> None:
    for arguments in (
        ["check", "rules", "alerts.yml"],
        ["check", "config", "prometheus.yml"],
        ["test", "rules", "alerts_test.yml"],
    ):
        done = promtool(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[ServerProcess]:
    with ServerProcess(
        tiny, command=FAKED, env={"TURNSTILE_FAULTS": "1"}, num_pages=96,
        max_model_len=1024, max_num_seqs=8, max_num_batched_tokens=64, max_num_queued_reqs=12,
        log_stats_interval=0,
    ) as running:  # fmt: skip
        yield running


@pytest.mark.e2e
def test_promtool_finds_nothing_wrong_with_our_metrics(server: ServerProcess) -> None:
    page = server.http.get("/metrics").text
    theirs = re.compile(r"^(# (HELP|TYPE) )?(vllm:|process_)")
    ours = [line for line in page.splitlines() if not theirs.match(line)]
    done = promtool("check", "metrics", text="\n".join(ours) + "\n")
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.e2e
def test_every_panel_of_the_dashboard_shows_something(
    server: ServerProcess, tmp_path: Path
) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed here")
    port = free_port()
    settings = replaced(
        (HERE / "prometheus.yml").read_text(),
        ("127.0.0.1:8000", server.url.removeprefix("http://")),
        ("15s", "1s"),
        ("alerts.yml", str(HERE / "alerts.yml")),
    )
    (tmp_path / "prometheus.yml").write_text(settings)
    process = subprocess.Popen(
        ["prometheus", f"--config.file={tmp_path}/prometheus.yml",
         f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address=127.0.0.1:{port}",
         "--log.level=error"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30.0) as prometheus:
            told = watch(server, prometheus)
            rules = prometheus.get("/api/v1/rules").json()["data"]["groups"][0]["rules"]
    finally:
        process.terminate()
        process.wait(30)
    empty = [f"{answer.panel}: {answer.expression}" for answer in told if not answer.good]
    assert empty == []
    assert {rule["name"] for rule in rules} == alerts()
    assert {rule["health"] for rule in rules} == {"ok"}
    firing = {rule["name"] for rule in rules if rule["state"] == "firing"}
    assert firing == set()


def watch(server: ServerProcess, prometheus: httpx.Client) -> list[try_dashboard.Answer]:
    """What the dashboard shows of a server in use, once it shows everything."""

    def ask(number: int) -> int:
        body: dict[str, Any] = {
            "prompt": [7] * 40 + [3 + number % 200] * (number % 90), "ignore_eos": True,
            "max_tokens": 10 + number % 60,
        }  # fmt: skip
        return server.post("/v1/completions", **body).status_code

    end = time.monotonic() + 60
    told: list[try_dashboard.Answer] = []
    while time.monotonic() < end:
        assert set(server.gather([lambda k=k: ask(k) for k in range(30)])) <= {200, 503}
        try:
            told = try_dashboard.answers(prometheus, "10s")
        except httpx.TransportError:
            continue  # it is still starting
        if all(answer.good for answer in told):
            break
    return told
