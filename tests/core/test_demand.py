"""What tenants ask for a second, as they did lately."""

from __future__ import annotations

import pytest

from turnstile.core.demand import MEMORY, MOST_TENANTS, Demand
from turnstile.core.forecast import Ahead

QUESTION = Ahead(1, 100, 50)


def asking(demand: Demand, tenant: str, every: float, start: float, end: float) -> float:
    """A tenant asks every so many seconds; returns when it did last."""
    now = start
    while now + every <= end:
        now += every
        demand.add(tenant, 1.0, QUESTION, now)
    return now


def per_second(demand: Demand, tenant: str) -> float:
    return demand.asked_by(tenant).samples * demand.scale


@pytest.mark.parametrize("seconds", [10.0, 60.0, 900.0])
def test_a_steady_rate_is_known_soon_and_stays_known(seconds: float) -> None:
    demand = Demand()
    asking(demand, "a", 0.25, 0.0, seconds)
    assert per_second(demand, "a") == pytest.approx(4.0, rel=0.05)
    assert demand.asked_by("a").prompt_tokens == pytest.approx(100 * demand.asked_by("a").samples)


def test_who_falls_silent_is_forgotten_and_a_long_silence_is_no_overflow() -> None:
    demand = Demand()
    asking(demand, "a", 0.25, 0.0, 60.0)
    asking(demand, "b", 0.5, 60.0, 60.0 + 3 * MEMORY)
    assert per_second(demand, "a") < 0.25
    assert per_second(demand, "b") == pytest.approx(2.0, rel=0.1)
    demand.add("b", 1.0, QUESTION, 1e7)
    assert per_second(demand, "a") == 0.0
    assert per_second(demand, "b") == pytest.approx(1 / MEMORY)


def test_only_so_many_tenants_are_remembered() -> None:
    demand = Demand()
    for number in range(MOST_TENANTS + 5):
        demand.add(f"t{number}", 2.0, QUESTION, 0.1 * number)
    assert len(demand.weights) == MOST_TENANTS
    assert not demand.asked_by("t4").samples
    assert demand.asked_by("t5").samples
    assert demand.others_ask("t5")
