"""One simulated machine's settings, and how a scheduler comes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from turnstile.core.admission import AdmissionPolicy
from turnstile.core.cost import Coefficients, CostModel
from turnstile.core.fairness import QueuePolicy
from turnstile.core.gate import Gate, GateConfig
from turnstile.core.pages import PagePool
from turnstile.core.scheduler import Scheduler
from turnstile.core.settings import SchedulerConfig
from turnstile.engine.policies import (
    PolicyError,
    admission_policy,
    preemption_policy,
    queue_policy,
)
from turnstile.simulate.fast_forward import FastForward
from turnstile.simulate.timing import KnownCost, StepTiming


@dataclass(frozen=True, slots=True)
class Front:
    """What is around the engine: the API process and the client, which do one thing after another.

    A step's rows come to the API process in one message. Each is text and bytes for one client, and
    all are on their way before any is read: the more rows, the later all of them. A row with which
    an answer begins or ends is as much work as a request at the door.

    Attributes
    ----------
    per_request
        Seconds of the API process for each request before the engine sees it, one after another;
        and seconds by which each row that is an answer's first or last delays those of its step.
    delivery
        Seconds from the end of a step to the client, however few rows it has.
    per_row
        Seconds by which each row of a step delays them all, in the mean.
    """

    per_request: float = 0.0
    delivery: float = 0.0
    per_row: float = 0.0

    def delay(self, rows: int, turning: int = 0) -> float:
        """Seconds from the end of a step to the clients: it has so many rows, of which so many are
        the first or the last of an answer.
        """
        return self.delivery + self.per_row * rows + self.per_request * turning


class SetupError(ValueError):
    """There is no such machine; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A machine: how long its steps take, its page pool, and the policies that run it."""

    timing: StepTiming
    measured_batch: int | None = None
    """Most sequences in a step that the timing was fitted to; None where nobody has said."""
    believes: Coefficients | None = None
    """What the scheduler takes steps to cost, as the server's does; None: what they do cost."""
    num_pages: int
    page_size: int = 16
    admission: str = "expected"
    policy: str = "fair"
    preemption: str = "fair"
    """The names of policies, as the engine takes them (:mod:`turnstile.engine.policies`)."""
    prefix_caching: bool = True
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    front: Front = field(default_factory=Front)
    learns_cost: bool = False
    """The scheduler learns what steps cost as they pass, as in a server that has just started;
    otherwise it knows from the start.
    """
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    max_queue_wait: float | None = None
    """Bounds of the gate, as the server's; all None lets everybody in."""

    past_outputs: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Lengths of the answers that each tenant has had before, oldest first: ``expected`` admission
    foretells those to come by them, and by a prior for tenants that have had none.
    """

    def __post_init__(self) -> None:
        try:
            admission_policy(self.admission)
            queue_policy(self.policy)
            preemption_policy(self.preemption)
        except PolicyError as error:
            raise SetupError(str(error)) from error

    def make_gate(self) -> Gate | None:
        """The gate of these settings, None where nothing is bounded."""
        bounds = (self.max_num_queued_reqs, self.max_num_queued_tokens, self.max_queue_wait)
        if bounds == (None, None, None):
            return None
        return Gate(
            GateConfig(
                slots=self.scheduler.max_num_seqs,
                budget=self.scheduler.max_num_batched_tokens,
                max_requests=self.max_num_queued_reqs,
                max_tokens=self.max_num_queued_tokens,
                max_wait=self.max_queue_wait or None,
                kv_tokens=self.num_pages * self.page_size,
                policy=queue_policy(self.policy),
                reserved_slots=self.scheduler.reserved_slots,
            )
        )

    @property
    def believed(self) -> Coefficients:
        """What a scheduler that need not learn takes steps to cost."""
        return self.believes or self.timing.coefficients

    def parts(self) -> tuple[PagePool, AdmissionPolicy, QueuePolicy]:
        """A new pool and new policies."""
        admission = admission_policy(self.admission)()
        for tenant, lengths in self.past_outputs.items():
            for length in lengths:
                admission.learn(tenant, length)
        return PagePool(self.num_pages, self.page_size), admission, queue_policy(self.policy)()

    def make_scheduler(self, *, fast: bool = False) -> Scheduler:
        """The scheduler of these settings; nothing but its clock is simulated.

        ``fast`` leaves out what changes nothing (:mod:`turnstile.simulate.fast_forward`).
        """
        pool, admission, queue = self.parts()
        attendance = FastForward(self.scheduler, admission) if fast else None
        return Scheduler(
            self.scheduler,
            pool,
            admission if attendance is None else attendance.admission,
            queue,
            prefix_caching=self.prefix_caching,
            cost=CostModel() if self.learns_cost else KnownCost(self.believed),
            victim=preemption_policy(self.preemption),
            attendance=attendance,
        )
