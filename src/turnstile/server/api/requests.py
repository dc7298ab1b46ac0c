"""``/v1/requests`` and ``/v1/requests/{id}``: why a request waits, where its time went, and a way
to end it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qs

from turnstile.core.events import WaitReason
from turnstile.core.fairness import QueuePolicy
from turnstile.core.forecast import Estimate
from turnstile.core.request import Request, Sequence
from turnstile.engine.client import EngineState
from turnstile.engine.policies import queue_policy
from turnstile.server.api.info import refuse_foreign_page
from turnstile.server.errors import ApiError, bad_request
from turnstile.server.http.exchange import Exchange
from turnstile.server.service import Service
from turnstile.server.watch.trails import Part, RequestTrail, SampleTrail

logger = logging.getLogger("turnstile.server")

STATES = ("alive", "waiting", "running", "ended", "all")
DEFAULT_LIMIT, MAX_LIMIT = 100, 1000

_STATE_OF = {Part.QUEUE: "queued", Part.RECOVERY: "recovering"}
_BLOCKING = (WaitReason.PAGES, WaitReason.SLOTS, WaitReason.BEHIND_HEAD)


async def requests(service: Service, exchange: Exchange) -> None:
    """List requests: those alive, then the last ones that ended. Own ones; admins see all."""
    state, limit = _query(exchange)
    view = View(service)
    trails = [
        trail
        for trail in (*view.log.alive(), *view.log.ended())
        if view.may_see(exchange, trail) and _matches(trail, state)
    ]
    await exchange.respond_json(
        {
            "object": "list",
            "data": [view.summary(trail) for trail in trails[:limit]],
            "has_more": len(trails) > limit,
        }
    )


async def request(service: Service, exchange: Exchange) -> None:
    """Tell of one request: by its `x-request-id`, or the `id` in its answer."""
    view = View(service)
    await exchange.respond_json(view.detail(_find(view, exchange)))


async def cancel(service: Service, exchange: Exchange) -> None:
    """End a request, one's own or, for an admin, any. Its answer ends with what there is."""
    refuse_foreign_page(service, exchange)
    view = View(service)
    found = _find(view, exchange)
    if found.record is not None:
        found.note(service.clock(), "cancelled")
        logger.info("Request %s is cancelled by %s", found.id, exchange.tenant.name)
        for job in found.record.jobs:
            if job.stream is not None:
                job.stream.abort()
    await exchange.respond_json(view.detail(found))


def _find(view: View, exchange: Exchange) -> RequestTrail:
    """The newest of that name that the caller may know of, one that is alive before others."""
    name = exchange.scope["path_params"]["id"]
    seen = [trail for trail in view.log.find(name) if view.may_see(exchange, trail)]
    if not seen:
        raise ApiError(
            404,
            "There is no such request, or it ended too long ago.",
            code="request_not_found",
        )
    return next((trail for trail in seen if trail.ended is None), seen[0])


def _query(exchange: Exchange) -> tuple[str, int]:
    given = parse_qs(exchange.scope.get("query_string", b"").decode("latin-1"))
    state = given.get("state", ["all"])[-1]
    if state not in STATES:
        raise bad_request(f"state must be one of {', '.join(STATES)}.", "state")
    text = given.get("limit", [str(DEFAULT_LIMIT)])[-1]
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= MAX_LIMIT):
        raise bad_request(f"limit must be a number from 1 to {MAX_LIMIT}.", "limit")
    return state, int(text)


def _matches(trail: RequestTrail, state: str) -> bool:
    if state == "all":
        return True
    if trail.ended is not None:
        return state == "ended"
    waits = trail.leading().waits
    return state == "alive" or (waits if state == "waiting" else not waits and state == "running")


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a waiting sample stands: its place, from 1, and what the first one waits for."""

    position: int
    of: int
    head: WaitReason


class View:
    """The log as it is told, at one moment."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.log = service.requests
        if service.engine.state is EngineState.RECOVERING:
            self.log.engine_lost()
        self._now = service.clock()
        self._order: dict[tuple[str, int], Standing] | None = None

    def may_see(self, exchange: Exchange, trail: RequestTrail) -> bool:
        """Whether the caller may know of a request: its own, or any for an admin."""
        return exchange.tenant.admin or exchange.tenant.name == trail.tenant

    # -- one request --------------------------------------------------------------------------

    def summary(self, trail: RequestTrail) -> dict[str, object]:
        """A request as the list shows it."""
        end = self._now if trail.ended is None else trail.ended
        samples = trail.samples.values()
        return {
            "id": trail.id,
            "object": "request",
            "answer_id": trail.answer_id,
            "path": trail.path,
            "tenant": trail.tenant,
            "priority": trail.priority,
            "state": self._state(trail),
            "finish_reason": trail.outcome,
            "age_seconds": _seconds(end - trail.arrived),
            **trail.tokens(),
            "preemptions": sum(sample.preemptions for sample in samples),
            "recomputed_tokens": sum(sample.recomputed for sample in samples),
            "crashes": max(sample.crashes for sample in samples),
            "predicted": _predicted(trail.estimate),
            "waits": self.waits(trail),
            "time": self._times(trail, end),
        }

    def detail(self, trail: RequestTrail) -> dict[str, object]:
        """A request with its samples, and what happened to it."""
        end = self._now if trail.ended is None else trail.ended
        several = len({engine_id for engine_id, _ in trail.samples}) > 1
        samples = []
        for number, ((_, index), sample) in enumerate(trail.samples.items()):
            samples.append(
                {
                    **({"prompt": number} if several and index == 0 else {}),
                    "sample": index,
                    "state": _word(sample),
                    "finish_reason": sample.finish,
                    "preemptions": sample.preemptions,
                    "recomputed_tokens": sample.recomputed,
                    "time": {str(p): _seconds(s) for p, s in sample.times(end).items()},
                }
            )
        notes = [{"at": _seconds(at), "event": word, **more} for at, word, more in trail.notes]
        return {
            **self.summary(trail),
            "samples": samples,
            "events": notes,
            "events_left_out": trail.more_notes,
        }

    def _state(self, trail: RequestTrail) -> str:
        return "ended" if trail.ended is not None else _word(trail.leading())

    def _times(self, trail: RequestTrail, end: float) -> dict[str, float]:
        """Seconds of each part, of the sample the answer waited for; they add up to the age.

        ``intake`` is parsing, tokenizing and the gate; ``delivery`` what the answer took after
        the engine had done its work.
        """
        sample = trail.leading()
        times = {"intake": trail.accepted - trail.arrived}
        times |= {str(part): seconds for part, seconds in sample.times(end).items()}
        times["delivery"] = max(0.0, end - (end if sample.ended is None else sample.ended))
        return {name: _seconds(seconds) for name, seconds in times.items()}

    # -- why it waits -------------------------------------------------------------------------

    def line(self) -> list[RequestTrail]:
        """Those waiting, in the order in which they should start. Those for whom there is no engine
        come first.
        """
        lost = [trail for trail in self.log.alive() if not trail.leading().handed_over]
        found = [self.log.by_engine_id(engine_id) for engine_id, _ in self._standings()]
        known = [trail for trail in found if trail is not None]
        return list(dict.fromkeys([*lost, *known]))

    def waits(self, trail: RequestTrail) -> dict[str, object] | None:
        """Why a request waits, since when, behind how many, how long yet; None if it does not."""
        sample = trail.leading()
        if sample.ended is not None:
            return None
        if sample.part is Part.RECOVERY and not sample.handed_over:
            return {
                "reason": "engine",
                "text": "The engine died and is being brought back; nothing of the answer is lost.",
                "since_seconds": _seconds(self._now - sample.since),
                "position": None,
                "of": None,
                "predicted_start_seconds": None,
            }
        if not sample.waits:
            return None
        key = next(key for key, value in trail.samples.items() if value is sample)
        standing = self._standings().get(key)
        reason = _reason(sample, standing)
        return {
            "reason": str(reason),
            "text": self._sentence(trail, reason, standing),
            "since_seconds": _seconds(self._now - sample.since),
            "position": standing.position if standing else None,
            "of": standing.of if standing else None,
            "predicted_start_seconds": self._predicted_start(trail, sample, standing),
        }

    def _standings(self) -> dict[tuple[str, int], Standing]:
        if self._order is None:
            info = self._service.engine.info
            policy = info.scheduling_policy if info is not None else "fair"
            waiting = {
                key: (trail, sample)
                for trail in self.log.alive()
                for key, sample in trail.samples.items()
                if sample.waits
            }
            tenants = self._service.metrics.snapshot.tenants
            order = expected_order(queue_policy(policy)(), waiting, tenants)
            blocked = (r for key in order if (r := waiting[key][1].reason) in _BLOCKING)
            head = next(blocked, WaitReason.QUEUED)
            self._order = {
                key: Standing(place, len(order), head) for place, key in enumerate(order, 1)
            }
        return self._order

    def _predicted_start(
        self, trail: RequestTrail, sample: SampleTrail, standing: Standing | None
    ) -> float | None:
        """Seconds until it starts: what is left of the gate's prediction, or, where there is none
        or it did not come true, its place times the pace of the queue. None where nobody knows.
        """
        if trail.estimate is not None and not sample.slotted:
            left = trail.accepted + trail.estimate.wait - self._now
            if left > 0:
                return _seconds(left)
        pace = self.log.seconds_per_start(self._now)
        return _seconds(pace * standing.position) if pace is not None and standing else None

    def _sentence(self, trail: RequestTrail, reason: WaitReason, standing: Standing | None) -> str:
        snapshot, info = self._service.metrics.snapshot, self._service.engine.info
        ahead = standing.position - 1 if standing else 0
        behind = f" {_count(ahead, 'is', 'are')} ahead of it." if ahead else ""
        slots = info.max_num_seqs if info else 0
        samples = (
            max((job.generation.n for job in trail.record.jobs), default=1) if trail.record else 1
        )
        free = snapshot.pages_free + snapshot.pages_cached
        match reason:
            case WaitReason.SLOTS if samples > 1:
                return f"It needs {samples} of the {slots} slots at once.{behind}"
            case WaitReason.SLOTS:
                return f"All {slots} slots are taken.{behind}"
            case WaitReason.PAGES:
                return (
                    f"What it may come to need does not fit beside those that run: {free} of "
                    f"{snapshot.pages_total} pages are free or cached.{behind}"
                )
            case WaitReason.TENANT_TURN:
                return (
                    "Its tenant runs already, and what is left is kept for tenants that run "
                    f"nothing.{behind}"
                )
            case WaitReason.BEHIND_HEAD:
                return (
                    "The first of the queue does not fit yet and is not overtaken for ever."
                    + behind
                )
            case WaitReason.PREFIX:
                return "Another request computes the beginning they share; it starts after that."
            case WaitReason.PREEMPTED:
                return f"It lost its slot and pages to an older one and keeps its place.{behind}"
            case _:
                return behind.strip() or "It is next: the coming step looks at it."


def _predicted(estimate: Estimate | None) -> dict[str, float] | None:
    """What the gate foretold when it let the request in."""
    if estimate is None:
        return None
    return {
        "queue_seconds": _seconds(estimate.wait),
        "queue_p90_seconds": _seconds(estimate.wait_p90),
        "ttft_seconds": _seconds(estimate.ttft),
        "ttft_p90_seconds": _seconds(estimate.ttft_p90),
    }


def _word(sample: SampleTrail) -> str:
    if sample.ended is not None:
        return "ended"
    return _STATE_OF.get(sample.part, str(sample.part))


def _reason(sample: SampleTrail, standing: Standing | None) -> WaitReason:
    """Why it waits. Who was never looked at waits because somebody before it does."""
    if sample.reason is not WaitReason.QUEUED or standing is None or standing.position == 1:
        return sample.reason
    return {
        WaitReason.SLOTS: WaitReason.SLOTS,
        WaitReason.PAGES: WaitReason.BEHIND_HEAD,
        WaitReason.BEHIND_HEAD: WaitReason.BEHIND_HEAD,
    }.get(standing.head, sample.reason)


def expected_order(
    queue: QueuePolicy,
    waiting: Mapping[tuple[str, int], tuple[RequestTrail, SampleTrail]],
    tenants: Mapping[str, float],
) -> list[tuple[str, int]]:
    """The order in which those waiting would start if each fitted when its turn came.

    It is drawn with the policy the engine runs: everybody enters a queue of that policy, tenants
    start from their present counters, and each start is charged what its prompt costs.
    """
    keys: dict[Sequence, tuple[str, int]] = {}
    for key, (trail, _) in waiting.items():
        record = trail.record
        assert record is not None  # it is alive
        job = next(j for j in record.jobs if j.generation.request_id == key[0])
        generation = job.generation
        sequence = Sequence(
            Request(
                id=key[0],
                prompt=tuple(generation.prompt),
                max_tokens=generation.max_tokens,
                tenant=generation.tenant,
                weight=generation.weight,
                priority=generation.priority,
                arrival=generation.arrival,
            ),
            arrival_order=len(keys),
        )
        keys[sequence] = key
        queue.arrive(sequence)
    charged: set[str] = set()
    for sequence in keys:
        tenant = sequence.request.tenant
        if tenant not in charged:
            charged.add(tenant)
            queue.charge(sequence, tenants.get(tenant, 0.0) * sequence.request.weight)
        queue.push(sequence)
    order = []
    while (first := queue.next()) is not None:
        queue.take(first)
        queue.charge(first, first.num_prompt)
        order.append(keys[first])
    return order


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _seconds(value: float) -> float:
    return round(max(0.0, value), 6)
