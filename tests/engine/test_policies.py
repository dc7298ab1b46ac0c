"""Policies by name: those in the core, and those of anybody else."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.driver import Driver
from turnstile.core.events import Finished
from turnstile.core.request import Request
from turnstile.core.scheduler import Scheduler
from turnstile.engine.build import make_scheduler
from turnstile.engine.config import EngineConfig, EngineConfigError

PAGE = Path(__file__).parents[2] / "docs" / "policies.md"


@pytest.fixture
def my_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example in the documents, where Python finds it."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(code.splitlines()) <= 50
    (tmp_path / "my_policies.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("my_policies", None)


def scheduler_of(num_pages: int = 64, **settings: str | int) -> Scheduler:
    config = EngineConfig(**settings)  # type: ignore[arg-type]
    config.check()
    return make_scheduler(config, num_pages, max_model_len=512)


def submit(driver: Driver, name: str, prompt: int, max_tokens: int = 4, tenant: str = "t") -> None:
    """A request whose prompt nobody else has."""
    driver.submit(
        Request(
            id=name, prompt=tuple(range(prompt)), max_tokens=max_tokens, tenant=tenant,
            salt=name.encode(),
        )
    )  # fmt: skip


def names_of(driver: Driver, kind: str) -> list[str]:
    """Whose requests an event of this kind befell, in order."""
    return [
        event.request_id
        for event in driver.events
        if type(event).__name__ == kind and hasattr(event, "request_id")
    ]


@pytest.mark.usefixtures("my_policies")
def test_a_queue_of_ones_own_says_who_is_next() -> None:
    driver = Driver(scheduler_of(scheduling_policy="my_policies:ShortFirst", max_num_seqs=1))
    for name, prompt, tenant in (("long", 200, "a"), ("short", 5, "a"), ("other", 100, "b")):
        submit(driver, name, prompt, tenant=tenant)
    while driver.scheduler.has_work:
        driver.step()
    assert names_of(driver, "Admitted") == ["short", "other", "long"], "tenants still share"


@pytest.mark.usefixtures("my_policies")
def test_an_admission_of_ones_own_says_who_may_start() -> None:
    def started(admission: str) -> int:
        driver = Driver(scheduler_of(num_pages=8, admission=admission))
        for name in ("first", "second"):
            submit(driver, name, prompt=8, max_tokens=100)
        driver.step()
        return len(driver.scheduler.running)

    assert started("guaranteed") == 1, "two of 107 tokens are more than 8 pages of 16"
    assert started("my_policies:HalfOfWhatIsAsked") == 2


@pytest.mark.usefixtures("my_policies")
def test_a_preemption_of_ones_own_says_who_must_go() -> None:
    def gone(preemption: str) -> str:
        driver = Driver(
            scheduler_of(
                num_pages=8, admission="my_policies:HalfOfWhatIsAsked", preemption=preemption
            )
        )
        for name, prompt in (("oldest", 4), ("short", 5), ("newest", 20)):
            submit(driver, name, prompt, max_tokens=40)
        while driver.scheduler.has_work:
            driver.step()
        return names_of(driver, "Preempted")[0]

    assert gone("my_policies:least_lost") == "short"
    assert gone("newest") == "newest"


@pytest.mark.parametrize(
    "body",
    [
        "raise ValueError('nobody')",
        "return 'nobody'",
        "return queue",
        "running.clear()",
        "return None",
    ],
)
@pytest.mark.usefixtures("my_policies")
def test_a_preemption_that_is_wrong_ends_nobodys_answer(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wrong.py").write_text(f"def choose(running, queue, pin_after):\n    {body}\n")
    monkeypatch.delitem(sys.modules, "wrong", raising=False)
    driver = Driver(
        scheduler_of(
            num_pages=8,
            admission="my_policies:HalfOfWhatIsAsked",
            preemption="wrong:choose",
        )
    )
    for name in ("oldest", "middle", "newest"):
        submit(driver, name, prompt=4, max_tokens=100)
    for _ in range(500):
        if driver.scheduler.has_work:
            driver.step()
    finished = [event.output_tokens for event in driver.events if isinstance(event, Finished)]
    assert finished == [100] * 3
    assert names_of(driver, "Preempted"), "pages ran out, or this shows nothing"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"admission": "maybe"}, "--admission: there is no policy 'maybe'; there are expected"),
        ({"scheduling_policy": "lottery"}, "--scheduling-policy: there is no policy 'lottery'"),
        ({"preemption": "oldest"}, "--preemption: there is no policy 'oldest'; there are fair"),
        ({"admission": "no_such_module:Policy"}, "No module named 'no_such_module'"),
        ({"admission": "my_policies:NoSuchClass"}, "NoSuchClass"),
        ({"admission": "my_policies:ShortFirst"}, "is not a subclass of AdmissionPolicy"),
        ({"scheduling_policy": "turnstile.core.fairness:QueuePolicy"}, "cannot be made"),
        ({"preemption": "my_policies:__doc__"}, "is not a function"),
    ],
)
@pytest.mark.usefixtures("my_policies")
def test_what_is_no_policy_is_refused_by_name(settings: dict[str, str], said: str) -> None:
    with pytest.raises(EngineConfigError, match=re.escape(said)):
        EngineConfig(**settings).check()  # type: ignore[arg-type]
