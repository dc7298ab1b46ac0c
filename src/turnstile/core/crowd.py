"""Who is inside: :class:`Place` for each prompt let in, and their sums in :class:`Crowd`.

What a gate needs to know of those before a newcomer, kept up to date in O(1) a change: sums of the
waiting by tenant and priority, and of those that run how many outputs they are still to draw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from turnstile.core.demand import Demand
from turnstile.core.fairness import OUTPUT_CHARGE, QueuePolicy
from turnstile.core.forecast import Ahead, Estimate
from turnstile.core.limits import NO_LIMITS, TenantLimits
from turnstile.core.output_means import OutputMeans


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one prompt will cost.

    Attributes
    ----------
    tenant, weight, priority
        Whose it is, and where it stands in the queue.
    prompt_tokens, n
        Tokens to compute, samples wanted.
    min_tokens, max_tokens
        Least and most outputs of each sample.
    limits
        What its tenant may use.
    """

    tenant: str = "default"
    weight: float = 1.0
    priority: int = 0
    prompt_tokens: int
    max_tokens: int
    min_tokens: int = 0
    n: int = 1
    limits: TenantLimits = NO_LIMITS


class Keeper(Protocol):
    """Who is told what becomes of a place."""

    def on_start(self, place: Place, now: float) -> None:
        """It got a slot."""

    def on_first_token(self, place: Place, now: float) -> None:
        """Its first token came out."""

    def on_leave(self, place: Place, now: float, outputs: Sequence[int], drawn: int | None) -> None:
        """It ended."""


class Place:
    """A place in the queue, from acceptance until the prompt's last sample ends."""

    __slots__ = (
        "_keeper",
        "entered",
        "estimate",
        "expected",
        "first_step",
        "left",
        "reserved",
        "started",
        "work",
    )

    def __init__(self, keeper: Keeper, work: Work, expected: float, now: float) -> None:
        self._keeper = keeper
        self.work = work
        self.expected = expected
        """Outputs of each sample, as forecast."""
        self.entered = now
        self.estimate: Estimate | None = None
        """What was predicted at the door; None while the cost model was cold."""
        self.reserved = 0.0
        """Tokens taken from its tenant's minute."""
        self.started = False
        self.first_step: int | None = None
        self.left = False

    def start(self, now: float) -> None:
        """It got a slot. May be said again."""
        if not self.started and not self.left:
            self.started = True
            self._keeper.on_start(self, now)

    def first_token(self, now: float) -> None:
        """Its first token came out. May be said again."""
        if self.first_step is None and not self.left:
            self.start(now)
            self._keeper.on_first_token(self, now)

    def leave(self, now: float, outputs: Sequence[int] = (), drawn: int | None = None) -> None:
        """It ended, however. May be said again.

        Parameters
        ----------
        outputs
            Lengths of the samples that ended by themselves: what the gate learns lengths from.
        drawn
            Output tokens of all samples, cancelled ones too; None: the sum of ``outputs``.
        """
        if not self.left:
            self.left = True
            self._keeper.on_leave(self, now, outputs, drawn)


class Backlog:
    """The waiting work of one tenant at one priority, in sums."""

    __slots__ = ("outputs", "prompt_tokens", "prompts", "samples")

    def __init__(self) -> None:
        self.prompts = 0
        self.samples = 0
        self.prompt_tokens = 0
        self.outputs = 0.0

    def add(self, place: Place, sign: int) -> None:
        work = place.work
        self.prompts += sign
        self.samples += sign * work.n
        self.prompt_tokens += sign * work.prompt_tokens
        self.outputs += sign * work.n * place.expected

    @property
    def charge(self) -> float:
        """Service that all of it will be charged."""
        return self.prompt_tokens + OUTPUT_CHARGE * self.outputs


@dataclass(frozen=True, slots=True)
class Ends:
    """When those who run will end.

    Attributes
    ----------
    steps
        Steps to come of every sample, ascending.
    decoding
        Samples that draw in every step already; the others' prompts are still computed.
    outputs, context
        Tokens all of them are still to draw; what each has in its pages, in the mean.
    """

    steps: list[float]
    decoding: int
    outputs: float
    context: float


class Crowd:
    """Everybody inside. ``policy`` is the engine's queue policy: it says who stands before whom."""

    def __init__(self, policy: type[QueuePolicy]) -> None:
        self.policy = policy
        self.waiting = Backlog()
        """All that wait."""
        self.running_samples = 0
        self.running_of: dict[str, int] = {}
        """Running samples of each tenant that has any."""
        self._running: dict[Place, None] = {}
        self._behind_of: dict[str, int] = {}
        self._backlogs: dict[str, dict[int, Backlog]] = {}
        self._weights: dict[str, float] = {}
        self._outputs: dict[str, OutputMeans] = {}
        self._demand = Demand()
        self._ends: tuple[int, Ends] | None = None

    def samples_of(self, tenant: str) -> int:
        """Samples of a tenant inside, waiting or running."""
        backlogs = self._backlogs.get(tenant, {}).values()
        return self.running_of.get(tenant, 0) + sum(backlog.samples for backlog in backlogs)

    def enter(self, place: Place) -> None:
        """Somebody begins to wait."""
        work = place.work
        self._weights[work.tenant] = work.weight
        asked = Ahead(work.n, work.prompt_tokens, work.n * place.expected)
        self._demand.add(work.tenant, work.weight, asked, place.entered)
        backlogs = self._backlogs.setdefault(work.tenant, {})
        backlog = backlogs.get(work.priority)
        if backlog is None:
            backlog = backlogs[work.priority] = Backlog()
        backlog.add(place, 1)
        self.waiting.add(place, 1)

    def start(self, place: Place) -> None:
        """Somebody got a slot."""
        self._stop_waiting(place)
        work = place.work
        self._running[place] = None
        self.running_samples += work.n
        self.running_of[work.tenant] = self.running_of.get(work.tenant, 0) + work.n
        self._behind_of[work.tenant] = self._behind_of.get(work.tenant, 0) + 1
        self._ends = None

    def first_token(self, place: Place) -> None:
        """Somebody's prompt is computed."""
        tenant = place.work.tenant
        self._behind_of[tenant] -= 1
        if not self._behind_of[tenant]:
            del self._behind_of[tenant]
        self._ends = None

    def leave(self, place: Place, outputs: Sequence[int]) -> None:
        """Somebody is gone; ``outputs`` as in :meth:`Place.leave`."""
        work = place.work
        if not place.started:
            self._stop_waiting(place)
            return
        del self._running[place]
        self._ends = None
        if place.first_step is None:
            self.first_token(place)
        self.running_samples -= work.n
        self.running_of[work.tenant] -= work.n
        if not self.running_of[work.tenant]:
            del self.running_of[work.tenant]
        for length in outputs:
            self._means(work.tenant).add(length)

    def _stop_waiting(self, place: Place) -> None:
        work = place.work
        self.waiting.add(place, -1)
        backlogs = self._backlogs[work.tenant]
        backlogs[work.priority].add(place, -1)
        if not backlogs[work.priority].prompts:
            del backlogs[work.priority]
            if not backlogs:
                del self._backlogs[work.tenant], self._weights[work.tenant]

    def _means(self, tenant: str) -> OutputMeans:
        means = self._outputs.get(tenant)
        if means is None:
            means = self._outputs[tenant] = OutputMeans()
        return means

    def expected(self, work: Work) -> float:
        """Mean outputs of each of its samples, from what the tenant's have been."""
        least = min(work.min_tokens, work.max_tokens)
        return self._means(work.tenant).expected(least, work.max_tokens)

    def next_end(self, tenant: str, step: int) -> float | None:
        """Steps until one of a tenant's running samples should end; None if it has none."""
        own = (_progress(p, step)[1] for p in self._running if p.work.tenant == tenant)
        return min(own, default=None)

    def ends(self, step: int, room: int, prefill_tokens: int) -> Ends:
        """When those who run will end, seen at ``step``.

        Those whose prompt is not computed yet begin to draw one after the other, shortest prompt
        first, while the ``prefill_tokens`` of all of them are computed at ``room`` a step.
        O(running · log running), once a step at most.
        """
        if self._ends is None or self._ends[0] != step:
            steps: list[float] = []
            behind: list[Place] = []
            outputs = context = 0.0
            for place in self._running:
                work = place.work
                done, left = _progress(place, step)
                context += work.n * (work.prompt_tokens + done)
                outputs += work.n * left
                if place.first_step is None:
                    behind.append(place)
                else:
                    steps += [left] * work.n
            decoding = len(steps)
            behind.sort(key=lambda place: place.work.prompt_tokens)
            tokens = sum(place.work.prompt_tokens for place in behind)
            share = prefill_tokens / tokens if tokens else 0.0
            computed = 0.0
            for place in behind:
                computed += share * place.work.prompt_tokens
                steps += [computed / room + place.expected] * place.work.n
            steps.sort()
            mean = context / len(steps) if steps else 0.0
            self._ends = (step, Ends(steps, decoding, outputs, mean))
        return self._ends[1]

    def prompts_beside(self, work: Work) -> int:
        """Prompts that a newcomer's shares its steps with: those of its tenant, and one of every
        other tenant (their shares are equal).
        """
        own = others = 0
        for tenant, count in self._behind_of.items():
            if tenant == work.tenant:
                own = count
            else:
                others += 1
        return own + others

    def knows(self, tenant: str) -> bool:
        """Whether the tenant was here before."""
        return tenant in self._outputs

    def others_ask(self, tenant: str) -> bool:
        """Whether other tenants have been heard of lately, and the queue tells them apart."""
        return self.policy.tenants_share and self._demand.others_ask(tenant)

    def ahead(
        self, work: Work, before: Ahead, served: Mapping[str, float], seconds: float = 0.0
    ) -> Ahead:
        """Who starts before a newcomer, after ``before``; ``served`` are the virtual counters.

        Work that other tenants will ask for within ``seconds``, and are owed, goes before it too.
        """
        samples, prompt, outputs = before.samples, before.prompt_tokens, before.outputs
        share, by_priority = self.policy.tenants_share, self.policy.by_priority
        own = self._backlogs.get(work.tenant, _NO_BACKLOGS)
        for backlogs in (own,) if share else self._backlogs.values():
            for priority, backlog in backlogs.items():
                if not by_priority or priority <= work.priority:
                    samples += backlog.samples
                    prompt += backlog.prompt_tokens
                    outputs += backlog.outputs
        ahead = Ahead(samples, prompt, outputs)
        return self._others(work, ahead, served, seconds) if share else ahead

    def _others(self, work: Work, own: Ahead, served: Mapping[str, float], seconds: float) -> Ahead:
        """Add what other tenants are owed by the time the newcomer's turn comes: the least served
        goes first, so each gets as much for its weight as the newcomer's tenant. O(tenants).
        """
        least = min(served.values(), default=0.0)
        turn = served.get(work.tenant, least) + own.charge / work.weight
        samples, prompt, outputs = own.samples, own.prompt_tokens, own.outputs
        demand, weights = self._demand, self._weights
        lately = seconds * demand.scale if seconds else 0.0
        for tenant in {**weights, **demand.weights} if seconds else weights:
            weight = weights.get(tenant) or demand.weights[tenant]
            owed = (turn - served.get(tenant, least)) * weight
            if owed <= 0 or tenant == work.tenant:
                continue
            backlogs, coming = self._backlogs.get(tenant, _NO_BACKLOGS), demand.asked_by(tenant)
            total = lately * coming.charge
            for backlog in backlogs.values():
                total += backlog.charge
            share = min(1.0, owed / total) if total else 1.0
            samples += share * lately * coming.samples
            prompt += share * lately * coming.prompt_tokens
            outputs += share * lately * coming.outputs
            for backlog in backlogs.values():
                samples += share * backlog.samples
                prompt += share * backlog.prompt_tokens
                outputs += share * backlog.outputs
        return Ahead(samples, prompt, outputs)


_NO_BACKLOGS: dict[int, Backlog] = {}


def _progress(place: Place, step: int) -> tuple[int, float]:
    """Outputs a running sample has drawn, one a step since its first, and those it is still to
    draw, at least 1. Written without calls: everybody who runs is looked at for every newcomer.
    """
    first = place.first_step
    done = 0 if first is None or step < first else step - first + 1
    left = place.expected - done
    if left < 1.0:  # it has outlived its forecast: the older, the more to come
        left = done / 3
    most = place.work.max_tokens - done
    if left > most:
        left = most
    return done, left if left > 1.0 else 1.0


__all__ = ["Backlog", "Crowd", "Ends", "Keeper", "Place", "Work"]
