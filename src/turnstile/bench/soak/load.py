"""The users: :class:`Crowd`. Each does something at random, over and over, until time is up."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from turnstile.bench.http import Server
from turnstile.bench.soak.asking import PATIENT, Answer, Manners, NoAnswerError, ask
from turnstile.bench.soak.orders import (
    COMPLETIONS,
    Order,
    content,
    failing_order,
    hurried_order,
    nonsense,
    outcome,
    random_order,
    samples,
)

SAMPLES = 16
LEAST_COMPARED = 8
"""A run is not over before this many answers could be compared, unless it takes far too long."""
TOO_LONG = 6.0
FLOOD, SURPRISE = 40, 10
THINK = 0.5
MOST_VIOLATIONS = 50

Habit = Callable[["Crowd", random.Random], Awaitable[None]]


class Crowd:
    """Many users of one server, and what they have seen.

    Attributes
    ----------
    seen
        Answers by the user's habit and by how they came out.
    violations
        What should not have happened, in words.
    """

    def __init__(self, server: Server, seed: int) -> None:
        self.server = server
        self.seen: Counter[tuple[str, str]] = Counter()
        self.violations: list[str] = []
        self.compared = 0
        self._seed = seed
        self._sample = samples(SAMPLES)
        self._alone: list[list[Any]] = []

    async def rehearse(self) -> None:
        """Record what each of the sample is answered while nobody else is there."""
        for order in self._sample:
            answer = await self.ask(order)
            if outcome(order, answer) != "answered":
                raise RuntimeError(f"An idle server does not answer {order}.")
            self._alone.append(content(order, answer))

    async def run(self, users: int, seconds: float) -> None:
        """Let the users loose; returns when the last answer is in."""
        loop = asyncio.get_running_loop()
        end, latest = loop.time() + seconds, loop.time() + TOO_LONG * seconds

        def over() -> bool:
            now = loop.time()
            return now >= latest or (now >= end and self.compared >= LEAST_COMPARED)

        async def user(number: int) -> None:
            rng = random.Random(f"{self._seed}/{number}")
            while not over():
                name = rng.choices(_NAMES, _WEIGHTS)[0]
                try:
                    await HABITS[name][1](self, rng)
                except (NoAnswerError, ValueError, KeyError, TypeError) as error:
                    self.complain(f"{name}: {error}")

        await asyncio.gather(*(user(number) for number in range(users)))

    def complain(self, violation: str) -> None:
        """Note what should not have happened."""
        self.seen["all", "wrong"] += 1
        if len(self.violations) < MOST_VIOLATIONS:
            self.violations.append(violation)

    async def ask(self, order: Order, manners: Manners = PATIENT) -> Answer:
        """The answer to an order, awaited to its end. Whoever is refused thinks for a moment."""
        answer = await ask(self.server, order.request(self.server), manners)
        assert answer is not None
        if answer.status == 503:
            await asyncio.sleep(THINK)
        return answer

    def note(self, habit: str, order: Order, answer: Answer, *, may_fail: bool = False) -> str:
        """Judge an answer and count it."""
        result = outcome(order, answer)
        if result == "failed" and not may_fail:
            raise ValueError(f"{order.body} failed: {answer.body or answer.events[-1]}")
        self.seen[habit, result] += 1
        return result


async def _use(crowd: Crowd, rng: random.Random) -> None:
    order = random_order(rng)
    crowd.note("use", order, await crowd.ask(order))


async def _compare(crowd: Crowd, rng: random.Random) -> None:
    """One of the sample: its answer must be the one it gets alone."""
    place = rng.randrange(SAMPLES)
    order = crowd._sample[place]
    answer = await crowd.ask(order)
    if crowd.note("compare", order, answer) != "answered":
        return
    crowd.compared += 1
    got = content(order, answer)
    if got != crowd._alone[place]:
        raise ValueError(f"sample {place} {order.body}: {got}, alone {crowd._alone[place]}")


async def _leave(crowd: Crowd, rng: random.Random) -> None:
    """Leave in the middle: of the queue, of the prefill, of the answer."""
    order = random_order(rng, longest=200)
    manners = Manners(leave_after=rng.choice((0, 1, 2, 5, 20)))
    asking = asyncio.create_task(
        ask(crowd.server, order.request(crowd.server), manners), name="leaving"
    )
    if rng.random() < 0.5:
        # After a moment, wherever the request may be then.
        await asyncio.wait([asking], timeout=rng.choice((0.0, 0.02, 0.2, 1.0)))
        asking.cancel()
    try:
        answer = await asking
    except (asyncio.CancelledError, NoAnswerError):
        crowd.seen["leave", "left"] += 1
        return
    if answer is None:
        crowd.seen["leave", "left"] += 1
    else:
        crowd.note("leave", order, answer)


async def _read_slowly(crowd: Crowd, rng: random.Random) -> None:
    """Read a long, wordy stream a kilobyte at a time; some give up."""
    order = random_order(rng, longest=100)
    body = {**order.body, "stream": True, "ignore_eos": True}
    order = Order(order.path, body)
    leave_after = rng.choice((None, None, 15))
    manners = Manners(pause=rng.choice((0.02, 0.2)), leave_after=leave_after)
    answer = await ask(crowd.server, order.request(crowd.server), manners)
    if answer is None:
        crowd.seen["read slowly", "left"] += 1
    else:
        crowd.note("read slowly", order, answer)


async def _flood(crowd: Crowd, rng: random.Random) -> None:
    """Many at the same moment: more than the queue holds."""
    orders = [random_order(rng, longest=8) for _ in range(FLOOD)]
    for order, answer in zip(
        orders, await asyncio.gather(*(crowd.ask(order) for order in orders)), strict=True
    ):
        crowd.note("flood", order, answer)


async def _surprise(crowd: Crowd, rng: random.Random) -> None:
    """Several at once whose answers are far longer than what users are used to ask for: more are
    let in than there is room for, and some are preempted.
    """
    orders = []
    for _ in range(SURPRISE):
        body = {"prompt": "once", "max_tokens": 100, "ignore_eos": True}
        chosen = {"seed": rng.getrandbits(32), "stream": rng.random() < 0.5}
        orders.append(Order(COMPLETIONS, {**body, **chosen}))
    for order, answer in zip(
        orders, await asyncio.gather(*(crowd.ask(order) for order in orders)), strict=True
    ):
        crowd.note("surprise", order, answer)


async def _talk_nonsense(crowd: Crowd, rng: random.Random) -> None:
    wrong = nonsense(rng, crowd.server)
    try:
        answer = await ask(crowd.server, wrong.request)
    except NoAnswerError:
        if 0 not in wrong.statuses:
            raise
        crowd.seen["talk nonsense", "cut off"] += 1
        return
    if answer is not None and answer.status == 503 and answer.retry_after:
        # A server that is full need not look at what it is asked.
        crowd.seen["talk nonsense", "refused"] += 1
        await asyncio.sleep(THINK)
        return
    if answer is None or answer.status not in wrong.statuses:
        raise ValueError(f"{answer} to {wrong.request[:400]!r}")
    crowd.seen["talk nonsense", "told so"] += 1


async def _fail(crowd: Crowd, rng: random.Random) -> None:
    order = failing_order(rng)
    result = crowd.note("fail", order, await crowd.ask(order), may_fail=True)
    if result == "answered":
        raise ValueError("a request that fails in its step was answered")


async def _hurry(crowd: Crowd, rng: random.Random) -> None:
    order = hurried_order(rng)
    crowd.note("hurry", order, await crowd.ask(order))


async def _probe(crowd: Crowd, rng: random.Random) -> None:
    path = rng.choice(("/health", "/metrics", "/v1/models", "/load", "/v1/requests"))
    answer = await ask(crowd.server, crowd.server.request("GET", path))
    if answer is None or answer.status not in (200, 503 if path == "/health" else 200):
        raise ValueError(f"{path}: {answer}")
    crowd.seen["probe", "answered"] += 1


HABITS: dict[str, tuple[float, Habit]] = {
    "use": (36, _use),
    "compare": (20, _compare),
    "leave": (14, _leave),
    "read slowly": (7, _read_slowly),
    "flood": (1, _flood),
    "surprise": (2, _surprise),
    "talk nonsense": (9, _talk_nonsense),
    "fail": (3, _fail),
    "hurry": (5, _hurry),
    "probe": (5, _probe),
}
"""What users do, and how often."""
_NAMES = list(HABITS)
_WEIGHTS = [weight for weight, _ in HABITS.values()]
