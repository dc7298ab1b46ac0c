"""What ``/v1/requests`` and the live map tell of requests, alive and ended: :class:`View`."""

from __future__ import annotations

from turnstile.core.events import WaitReason
from turnstile.core.forecast import Estimate
from turnstile.engine.client import EngineState
from turnstile.engine.policies import queue_policy
from turnstile.server.http.exchange import Exchange
from turnstile.server.service import Service
from turnstile.server.watch.trails import Part, RequestTrail, SampleKey, SampleTrail
from turnstile.server.watch.waiting_line import Standing, in_order, reason_of, standings

_STATE_OF = {Part.QUEUE: "queued", Part.RECOVERY: "recovering"}


class View:
    """The log as it is told, at one moment."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.log = service.requests
        if service.engine.state is EngineState.RECOVERING:
            self.log.engine_lost()
        self._now = service.clock()
        self._order: dict[SampleKey, Standing] | None = None
        self._starts: dict[SampleKey, float | None] | None = None

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
        reason = reason_of(sample, standing)
        return {
            "reason": str(reason),
            "text": self._sentence(trail, reason, standing),
            "since_seconds": _seconds(self._now - sample.since),
            "position": standing.position if standing else None,
            "of": standing.of if standing else None,
            "predicted_start_seconds": self._predicted_starts().get(key),
        }

    def _standings(self) -> dict[SampleKey, Standing]:
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
            self._order = standings(queue_policy(policy)(), waiting, tenants)
        return self._order

    def _predicted_starts(self) -> dict[SampleKey, float | None]:
        """Seconds until each of those waiting starts; None where nobody knows."""
        if self._starts is None:
            order = self._standings()  # a dict in the order of the line
            starts = in_order([self._own_start(key, place) for key, place in order.items()])
            self._starts = dict(zip(order, starts, strict=True))
        return self._starts

    def _own_start(self, key: SampleKey, standing: Standing) -> float | None:
        """What is left of the gate's prediction, or, where there is none or it did not come true,
        the place times the pace of the queue.
        """
        trail = self.log.by_engine_id(key[0])
        if trail is None:
            return None
        if trail.estimate is not None and not trail.samples[key].slotted:
            left = trail.accepted + trail.estimate.wait - self._now
            if left > 0:
                return _seconds(left)
        pace = self.log.seconds_per_start(self._now)
        return None if pace is None else _seconds(pace * standing.position)

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


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _seconds(value: float) -> float:
    return round(max(0.0, value), 6)
