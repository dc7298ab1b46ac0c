"""The same scheduler, without touching those for whom nothing changes.

A sequence that decodes gets one token a step: until its next page border and its end, all that
changes is that it is longer. Here such a sequence *sleeps*: it is absent from the step
(:mod:`turnstile.core.attendance`), and what it missed is made up when somebody looks (admission,
preemption) or when its page is full. A step then costs O(what changes in it) instead of O(batch),
and one in which all sleep is not even planned (:meth:`FastForward.skip`).

    awake ──commit: it decodes, in the middle of a page──▶ asleep ──▶ page full: published, and
      ▲                                                      │        the next one taken; sleeps on
      └────── its last token comes, or it is preempted ◀─────┘

Nothing is approximated: same pages, same order of finishing, same counters, to the last bit, which
``tests/simulate/test_fast_forward.py`` checks against the plain scheduler. What it takes is that
a request's length is known, that outputs are like no other request's (so that no page of an answer
is a second copy) and that adding up 2 ÷ weight is exact: weights that are powers of two.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator

from turnstile.core.admission import AdmissionPolicy, Candidate, Outlook
from turnstile.core.attendance import Attendance
from turnstile.core.cost import StepCost
from turnstile.core.fairness import OUTPUT_CHARGE
from turnstile.core.pages import PagePool
from turnstile.core.plan import Plan
from turnstile.core.request import Sequence, State
from turnstile.core.settings import SchedulerConfig

Appointment = tuple[Sequence, int]


def exact_weight(weight: float) -> bool:
    """Whether charging ``weight`` in one sum is the same as charging it token by token."""
    return math.frexp(weight)[0] == 0.5


class _UpToDate(AdmissionPolicy):
    """Another policy, which finds everybody as long as they really are once it looks at them."""

    def __init__(self, policy: AdmissionPolicy, catch_up: Callable[[], None]) -> None:
        self._policy = policy
        self._catch_up = catch_up
        self.name = policy.name
        self.preempts = policy.preempts
        self.lockstep = policy.lockstep

    def remaining(self, sequence: Sequence) -> int:
        return self._policy.remaining(sequence)

    def learn(self, tenant: str, outputs: int) -> None:
        self._policy.learn(tenant, outputs)

    def fits(
        self,
        candidate: Candidate,
        running: Iterable[Sequence],
        pool: PagePool,
        reserve: int = 0,
        outlook: Outlook | None = None,
    ) -> bool:
        return self._policy.fits(candidate, self._caught_up(running), pool, reserve, outlook)

    def peak(self, candidate: Candidate | None, running: Iterable[Sequence], pool: PagePool) -> int:
        return self._policy.peak(candidate, self._caught_up(running), pool)

    def _caught_up(self, running: Iterable[Sequence]) -> Iterator[Sequence]:
        """Those who run; nobody is made up for a policy that looks at none of them."""
        self._catch_up()
        yield from running


class FastForward(Attendance):
    """Lets those sleep for whom nothing changes. See the module.

    ``outputs_of`` and ``token_of`` tell a sequence's length and its tokens; ``on_wake`` is told of
    a sequence that has slept.
    """

    outputs_of: Callable[[Sequence], int]
    token_of: Callable[[Sequence], int]
    on_wake: Callable[[Sequence], None]

    def __init__(self, config: SchedulerConfig, policy: AdmissionPolicy) -> None:
        if config.separate_prefill or config.speculation:
            raise ValueError("Prompts alone in a step, and drafts, cannot be fast-forwarded.")
        self.admission = _UpToDate(policy, self.look)
        """``policy``, to be given to the scheduler in its place."""
        self._clock = 0
        self._asleep: dict[Sequence, int] = {}
        """The step up to which each has been made up."""
        self._awake: dict[Sequence, int] = {}
        """The others that run, and their place in the order of admission."""
        self._places: dict[Sequence, int] = {}
        self._admissions = 0
        self._context = 0
        self._tenants: dict[str, dict[Sequence, None]] = defaultdict(dict)
        # Whose page is full after a step, who takes one in it, whose last token comes in it. Who
        # has woken in between has another number: what was planned for its former sleep is void.
        self._sleeps = 0
        self._number: dict[Sequence, int] = {}
        self._full_at: dict[int, list[Appointment]] = defaultdict(list)
        self._page_at: dict[int, list[Appointment]] = defaultdict(list)
        self._last_at: dict[int, list[Appointment]] = defaultdict(list)

    # -- what the scheduler asks and tells --------------------------------------------------------

    def begin(self) -> None:
        for sequence in self._kept(self._last_at):
            self._wake(sequence)

    def present(self) -> list[Sequence]:
        pool, growing = self.books.pool, self._kept(self._page_at)
        if len(growing) + len(self._awake) > pool.num_available:
            # Somebody may have to go, and who, depends on whose turn it is: as usual, then.
            for sequence in list(self._asleep):
                self._wake(sequence)
            growing = []
        for sequence in growing:
            pool.append(sequence.table)
        return sorted(self._awake, key=self._awake.__getitem__)

    @property
    def absent(self) -> StepCost:
        count = len(self._asleep)
        context = self._context + count
        return StepCost(count, context, count, context, context)

    def absent_tenants(self) -> Collection[str]:
        return [tenant for tenant, members in self._tenants.items() if members]

    def look(self) -> None:
        for sequence in self._asleep:
            self._make_up(sequence)

    def committed(self, plan: Plan, now: float) -> None:
        self._commit_asleep(now)
        for chunk in plan.chunks:
            self._try_sleep(chunk.sequence)

    def started(self, sequence: Sequence) -> None:
        self._admissions += 1
        self._awake[sequence] = self._places[sequence] = self._admissions

    def stopping(self, sequence: Sequence) -> None:
        self._wake(sequence)
        self._awake.pop(sequence, None)
        self._places.pop(sequence, None)

    # -- steps of those asleep alone --------------------------------------------------------------

    @property
    def steady(self) -> bool:
        """Whether the next step is of those asleep alone: nobody is awake, nobody's last token
        comes, nobody waits who could start.
        """
        books = self.books
        return (
            bool(self._asleep)
            and not self._awake
            and self._clock not in self._last_at
            and (not len(books.waiting) or books.slots.free <= 0)
            and not books.ended
        )

    def skip(self, now: float) -> bool:
        """Plan and commit a :attr:`steady` step that ends at ``now``, in one; with a deadline to
        watch or too few pages it must be planned, and nothing is done: False.
        """
        books, cost = self.books, self.absent
        growing = self._page_at.get(self._clock, ())
        if len(growing) > books.pool.num_available or len(books.deadlines):
            return False
        for sequence in self._kept(self._page_at):
            books.pool.append(sequence.table)
        books.statistics.steps += 1
        books.statistics.generated_tokens += cost.batch
        books.statistics.computed_tokens += cost.batch
        self._commit_asleep(now)
        return True

    def _commit_asleep(self, now: float) -> None:
        self._clock += 1
        self._context += len(self._asleep)
        for members in self._tenants.values():
            self._charge(members)
        self._publish_full(now)

    def _charge(self, members: dict[Sequence, None]) -> None:
        """A token for each of a tenant's sleepers, on the tenant's account."""
        if members:
            any_of_them = next(iter(members))
            own = any_of_them.charged
            self.books.queue.charge(any_of_them, OUTPUT_CHARGE * len(members))
            any_of_them.charged = own

    def _publish_full(self, now: float) -> None:
        for sequence in self._kept(self._full_at):
            self._make_up(sequence)
            self.books.publish(sequence, sequence.computed - 1, now)
            appointment = (sequence, self._number[sequence])
            self._page_at[self._clock].append(appointment)
            self._full_at[self._clock + self.books.pool.page_size].append(appointment)

    def _kept(self, book: dict[int, list[Appointment]]) -> list[Sequence]:
        """Who has something to do now, and still sleeps as when that was written down."""
        due = book.pop(self._clock, ())
        return [s for s, number in due if self._number.get(s) == number]

    # -- asleep and awake -------------------------------------------------------------------------

    def _try_sleep(self, sequence: Sequence) -> None:
        """Let a sequence sleep that only decodes, is inside a page and is not about to end."""
        inside = sequence.computed % self.books.pool.page_size
        left = self.outputs_of(sequence) - sequence.num_outputs
        if sequence.state is not State.RUNNING or sequence.catching_up or not inside or left < 2:
            return
        del self._awake[sequence]
        self._asleep[sequence] = self._clock
        self._tenants[sequence.request.tenant][sequence] = None
        self._context += sequence.computed
        self._sleeps += 1
        self._number[sequence] = self._sleeps
        appointment = (sequence, self._sleeps)
        self._full_at[self._clock + self.books.pool.page_size - inside].append(appointment)
        self._last_at[self._clock + left - 1].append(appointment)

    def _wake(self, sequence: Sequence) -> None:
        if sequence in self._asleep:
            self._make_up(sequence)
            del self._asleep[sequence], self._number[sequence]
            del self._tenants[sequence.request.tenant][sequence]
            self._context -= sequence.computed
            self._awake[sequence] = self._places[sequence]
            self.on_wake(sequence)

    def _make_up(self, sequence: Sequence) -> None:
        missed = self._clock - self._asleep[sequence]
        if missed:
            sequence.tokens += [self.token_of(sequence)] * missed
            sequence.computed += missed
            sequence.charged += OUTPUT_CHARGE * missed
            self._asleep[sequence] = self._clock
