"""The waiting line as the API process sees it: :func:`expected_order`, and what each waits for.

The queue itself is in the engine process, and the order in it is not a list: with fair sharing the
next one depends on who is served meanwhile. So the order is drawn with the policy that the engine
runs, when somebody asks (``docs/decisions/places-in-the-queue.md``).
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from turnstile.core.events import WaitReason
from turnstile.core.fairness import QueuePolicy
from turnstile.core.request import Request, Sequence
from turnstile.server.watch.trails import RequestTrail, SampleKey, SampleTrail

Line = Mapping[SampleKey, tuple[RequestTrail, SampleTrail]]
"""The samples that wait."""

_BLOCKING = (WaitReason.PAGES, WaitReason.SLOTS, WaitReason.BEHIND_HEAD)


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a waiting sample stands: its place, from 1, and what the first one waits for."""

    position: int
    of: int
    head: WaitReason


def standings(
    queue: QueuePolicy, waiting: Line, tenants: Mapping[str, float]
) -> dict[SampleKey, Standing]:
    """Where each of those waiting stands; parameters as of :func:`expected_order`."""
    order = expected_order(queue, waiting, tenants)
    blocked = (reason for key in order if (reason := waiting[key][1].reason) in _BLOCKING)
    head = next(blocked, WaitReason.QUEUED)
    return {key: Standing(place, len(order), head) for place, key in enumerate(order, 1)}


def reason_of(sample: SampleTrail, standing: Standing | None) -> WaitReason:
    """Why a sample waits. One that was never looked at waits because one before it does."""
    if sample.reason is not WaitReason.QUEUED or standing is None or standing.position == 1:
        return sample.reason
    return {
        WaitReason.SLOTS: WaitReason.SLOTS,
        WaitReason.PAGES: WaitReason.BEHIND_HEAD,
        WaitReason.BEHIND_HEAD: WaitReason.BEHIND_HEAD,
    }.get(standing.head, sample.reason)


def in_order(starts: Seq[float | None]) -> list[float | None]:
    """Predicted starts, given to those who wait in the order in which they wait.

    Each was predicted when its request came, and whose turn it is has changed since: a tenant that
    was served meanwhile stands behind one that was not. The slots still come free when they were
    predicted to, and the first in the line gets the first of them. Who has none keeps none.
    """
    known = iter(sorted(start for start in starts if start is not None))
    return [None if start is None else next(known) for start in starts]


def expected_order(
    queue: QueuePolicy,
    waiting: Line,
    tenants: Mapping[str, float],
) -> list[SampleKey]:
    """The order in which those waiting would start if each fitted when its turn came.

    All of them enter the empty ``queue``, a new one of the policy that the engine runs. ``tenants``
    are the present counters, and each start is charged what its prompt costs.
    """
    keys: dict[Sequence, SampleKey] = {}
    for key, (trail, _) in waiting.items():
        record = trail.record
        assert record is not None  # it is alive
        job = next(j for j in record.jobs if j.generation.request_id == key[0])
        generation = job.generation
        sequence = Sequence(
            Request(
                id=key[0],
                # Policies look at lengths, not at tokens; a copy of all prompts would take long.
                prompt=(0,) * len(generation.prompt),
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
