"""A model without weights: the token after a prefix is a hash of (seed, sample, prefix).

:class:`FakeModel` also simulates the KV cache, page by page: what a chunk reads must be what its
sequence wrote (or shared), so a page given to two writers, evicted too early or copied too late
shows as a wrong read, not just as a wrong count.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from hashlib import blake2b
from itertools import pairwise
from typing import Any

from turnstile.core.admission import ADMISSION_POLICIES, AdmissionPolicy, Candidate
from turnstile.core.events import Admitted, AnyEvent, Finished, Forked, Preempted, Queued
from turnstile.core.fairness import QUEUE_POLICIES, QueuePolicy
from turnstile.core.pages import PagePool
from turnstile.core.plan import Chunk, Outcome, Plan, Progress
from turnstile.core.preemption import choose_victim
from turnstile.core.request import FinishReason, Request, Sequence, State
from turnstile.core.scheduler import Scheduler, SchedulerConfig

VOCABULARY = 50


def next_token(sample: int, prefix: list[int]) -> int:
    """The draw after ``prefix``: depends on nothing else."""
    text = repr((sample, len(prefix), prefix)).encode()
    return int.from_bytes(blake2b(text, digest_size=4).digest(), "little") % VOCABULARY


def solo(request: Request, sample: int = 0, max_model_len: int = 10**9) -> list[int]:
    """What the request gets on a machine of its own."""
    tokens = list(request.prompt)
    outputs: list[int] = []
    while len(outputs) < request.max_tokens and len(tokens) < max_model_len:
        token = next_token(sample, tokens)
        tokens.append(token)
        outputs.append(token)
        if token in request.stop_ids and len(outputs) > request.min_tokens:
            break
    return outputs


class OptimisticAdmission(AdmissionPolicy):
    """Believes that everybody is about to end, and so runs out of pages."""

    name = "optimistic"

    def remaining(self, sequence: Sequence) -> int:
        return 1


class FakeModel:
    """Executes plans on a KV cache of plain token ids."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.kv: dict[int, list[int | None]] = defaultdict(lambda: [None] * page_size)

    def run(self, plan: Plan) -> list[Outcome]:
        for source, target in plan.copies:
            self.kv[target] = list(self.kv[source])
        outcomes = [self._chunk(chunk) for chunk in plan.chunks]
        # A plan is a value: without its copies (made once) it can be computed again.
        assert outcomes == [self._chunk(chunk) for chunk in plan.chunks]
        return outcomes

    def _chunk(self, chunk: Chunk) -> Outcome:
        sequence = chunk.sequence
        known = [*sequence.tokens, *chunk.drafts]
        assert chunk.count > 0
        assert chunk.end <= len(known)
        pages = sequence.table.pages
        for position in range(chunk.start, chunk.end):
            page, offset = divmod(position, self.page_size)
            self.kv[pages[page]][offset] = known[position]
        read = [self.kv[pages[p // self.page_size]][p % self.page_size] for p in range(chunk.end)]
        assert read == known[: chunk.end], f"{sequence} reads another's KV"
        if not chunk.samples:
            return Outcome()
        assert chunk.end == len(known)
        if chunk.drafts:
            return Outcome(self._accept(sequence, chunk.drafts))
        if chunk.samples > 1:
            return Outcome(tuple(next_token(i, known) for i in range(chunk.samples)))
        return Outcome((next_token(sequence.index, known),))

    def _accept(self, sequence: Sequence, drafts: tuple[int, ...]) -> tuple[int, ...]:
        tokens = list(sequence.tokens)
        drawn: list[int] = []
        for draft in (*drafts, None):
            token = next_token(sequence.index, tokens)
            tokens.append(token)
            drawn.append(token)
            if token != draft:
                break
        return tuple(drawn)


def make_scheduler(
    *,
    pages: int = 16,
    page_size: int = 4,
    admission: str | AdmissionPolicy = "expected",
    queue: str | QueuePolicy = "fair",
    prefix_caching: bool = True,
    **config: object,
) -> Scheduler:
    """A small scheduler; ``config`` goes to :class:`SchedulerConfig`."""
    settings: dict[str, object] = {
        "max_num_seqs": 8, "max_num_batched_tokens": 16, "max_model_len": 200, "min_chunk": 4,
    }  # fmt: skip
    settings.update(config)
    policies = ADMISSION_POLICIES | {"optimistic": OptimisticAdmission}
    policy = policies[admission]() if isinstance(admission, str) else admission
    return Scheduler(
        SchedulerConfig(**settings),  # type: ignore[arg-type]
        PagePool(pages, page_size),
        policy,
        QUEUE_POLICIES[queue]() if isinstance(queue, str) else queue,
        prefix_caching=prefix_caching,
    )


def tenants_of(scheduler: Scheduler) -> list[Any]:
    """The books of the queue, where it keeps any."""
    return list(getattr(scheduler.queue, "_tenants", {}).values())


class Driver:
    """A scheduler and its model, with everything checked that can be checked at every step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.now = 0.0
        self.passed_over = 0
        self.outputs: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.submitted: set[tuple[str, int]] = set()
        self.paid: dict[tuple[str, int], float] = {}
        self.finished: dict[tuple[str, int], FinishReason] = {}
        self.errors: dict[tuple[str, int], str | None] = {}
        self.events: list[AnyEvent] = []
        self.plans: list[Plan] = []
        self.max_running = 0
        self.before_plan: Callable[[Driver], None] | None = None
        self.break_row: Callable[[Chunk], bool] = lambda chunk: False
        self.install(scheduler)

    def install(self, scheduler: Scheduler) -> None:
        """Go on with another scheduler, on a machine that remembers nothing: as after a crash."""
        self.scheduler = scheduler
        self.model = FakeModel(scheduler.pool.page_size)
        self.events = []
        self.submitted -= set(self.finished)
        self.gone = set(self.finished)
        self._check_the_bound_of_pages()
        self._check_memory_of_the_blocked()

    def _check_the_bound_of_pages(self) -> None:
        """Whoever is let in because nobody can need more would be let in if all were looked at."""
        admission = self.scheduler.admission
        fits = admission.fits

        def fitting(*arguments: object, **named: object) -> bool:
            answer = fits(*arguments, **named)  # type: ignore[arg-type]
            assert answer == fits(*arguments[:4])  # type: ignore[arg-type]
            return answer

        admission.fits = fitting  # type: ignore[method-assign]

    def _check_memory_of_the_blocked(self) -> None:
        """Whoever is passed over because it did not fit before would not fit now either."""
        scheduler, entrance = self.scheduler, self.scheduler.entrance
        remembered = entrance._still_blocked

        def still_blocked(sequence: Sequence) -> bool:
            answer = remembered(sequence)
            if answer:
                self.passed_over += 1
                pages = scheduler.cache.match(sequence)
                assert scheduler.cache.awaited_key(sequence, len(pages)) is None
                reserve = entrance._reserve_against(sequence)
                candidate = Candidate(sequence, pages)
                running, pool = scheduler.running, scheduler.pool
                assert not scheduler.admission.fits(candidate, running, pool, reserve)
            return answer

        entrance._still_blocked = still_blocked  # type: ignore[method-assign]

    def submit(self, request: Request, **settings: object) -> Sequence:
        sequence = self.scheduler.submit(request, now=self.now, **settings)  # type: ignore[arg-type]
        self.outputs[request.id, sequence.index] = list(sequence.outputs)
        if sequence.charged:
            paid = sequence.charged - 2.0 * sequence.num_outputs
            self.paid[request.id, sequence.index] = paid
        self.submitted |= {(request.id, sequence.index + k) for k in range(sequence.fork_width)}
        return sequence

    def cancel(self, request_id: str, sample: int | None = None) -> None:
        self._take(self.scheduler.cancel(request_id, sample, now=self.now))
        self.scheduler.audit()

    def step(self, seconds: float = 1.0) -> Plan:
        scheduler = self.scheduler
        if self.before_plan is not None:
            self.before_plan(self)
        eldest = scheduler.running[0] if scheduler.running else None
        plan = scheduler.plan(self.now)
        self._take(scheduler.take_ended())
        scheduler.audit()
        self._check_plan(plan)
        assert not any(
            s.request.deadline is not None and s.request.deadline <= self.now
            for s in (*scheduler.running, *scheduler.waiting())
        ), "somebody outlives its deadline"
        # Decode, or a chunk of the prompt: the one admitted first is in every step.
        if scheduler.choose_victim is choose_victim:
            assert eldest is None or eldest.state is not State.WAITING, "the oldest had to go"
        if eldest is not None and eldest.state is State.RUNNING:
            assert any(chunk.sequence is eldest for chunk in plan.chunks), f"{eldest} stands still"
        if (scheduler.running or scheduler.num_waiting) and scheduler.admission.preempts:
            assert plan, "there is work and nobody runs"
        outcomes = self.model.run(plan)
        outcomes = [
            Outcome(error="broken") if self.break_row(chunk) else outcome
            for chunk, outcome in zip(plan.chunks, outcomes, strict=True)
        ]
        self.now += seconds
        self._take(scheduler.commit(plan, outcomes, self.now, seconds))
        scheduler.audit()
        self.events += scheduler.take_events()
        self.plans.append(plan)
        return plan

    def run(self, most_steps: int = 20_000) -> None:
        """Step until nothing is left."""
        for _ in range(most_steps):
            if not self.scheduler.has_work:
                self.check_idle()
                return
            self.step()
        raise AssertionError("the work does not end")

    def check_idle(self) -> None:
        """Nothing leaks, and the books are at zero."""
        scheduler = self.scheduler
        self.events += scheduler.take_events()
        assert scheduler.pool.num_held == 0
        assert scheduler.pool.num_shared == 0
        assert scheduler.num_waiting == 0
        assert scheduler.waiting_tokens == 0
        assert scheduler.waiting_by_reason == {}
        assert scheduler.slots.reserved == 0
        assert scheduler.slots.free == scheduler.config.max_num_seqs
        assert not list(scheduler.books.alive)
        assert not scheduler.cache._writer_of
        assert not scheduler.cache._writes
        assert not scheduler.cache._waiters
        assert all(tenant.running == tenant.alive == 0 for tenant in tenants_of(scheduler))
        scheduler.audit()
        self.check_events()

    def check_events(self) -> None:
        """Each sample enters once and finishes once; the preempted are admitted again or end."""
        kinds: dict[tuple[str, int], list[type]] = defaultdict(list)
        for event in self.events:
            if isinstance(event, Queued | Admitted | Forked | Preempted | Finished):
                kinds[event.request_id, event.index].append(type(event))
        for key, seen in kinds.items():
            counts = Counter(seen)
            assert counts[Queued] + counts[Forked] == 1, (key, seen)
            assert seen[0] in (Queued, Forked), (key, seen)
            assert counts[Finished] == 1, (key, seen)
            assert seen[-1] is Finished, (key, seen)
            for kind, after in pairwise(seen):
                if kind is Preempted:
                    assert after in (Admitted, Finished), (key, seen)
                if kind is Admitted:
                    assert after is not Admitted, (key, seen)
        assert set(self.finished) - self.gone == self.submitted
        for request_id, index in self.submitted - set(kinds):
            # Ended with the sample it would have forked from.
            assert index > 0
            assert not self.outputs[request_id, index]
            assert self.finished[request_id, index] is self.finished[request_id, 0]

    def _check_plan(self, plan: Plan) -> None:
        config, pool = self.scheduler.config, self.scheduler.pool
        running = len(self.scheduler.running)
        self.max_running = max(self.max_running, running)
        assert running + self.scheduler.slots.reserved <= config.max_num_seqs
        if config.chunked_prefill:
            assert plan.num_tokens <= config.max_num_batched_tokens
        sequences = [chunk.sequence for chunk in plan.chunks]
        assert len(set(map(id, sequences))) == len(sequences)
        written: Counter[int] = Counter()
        for chunk in plan.chunks:
            assert chunk.start == chunk.sequence.computed
            first, last = chunk.start // pool.page_size, (chunk.end - 1) // pool.page_size
            pages = chunk.sequence.table.pages[first : last + 1]
            written.update(pages)
            for page in pages:
                assert pool.refcount(page) == 1, "a shared page is written"
                assert not pool.is_published(page), "a published page is written"
        assert all(count == 1 for count in written.values())

    def _check_charge(self, sequence: Sequence) -> None:
        """2 for each output, and the prompt once, by what the cache had of it: what is computed
        again is charged to nobody.
        """
        prompt = sequence.charged - 2.0 * sequence.num_outputs
        paid_elsewhere = self.paid.get((sequence.request.id, sequence.index))
        if paid_elsewhere:
            assert prompt == paid_elsewhere
        elif sequence.index or sequence.started is None:
            assert prompt == 0
        else:
            assert prompt == sequence.num_prompt - sequence.num_cached

    def _take(self, progress: list[Progress]) -> None:
        for step in progress:
            key = (step.sequence.request.id, step.sequence.index)
            assert key not in self.finished, f"{key} goes on after its end"
            assert step.first == len(self.outputs[key])
            self.outputs[key] += step.tokens
            if step.finish is not None:
                self._check_charge(step.sequence)
                self.finished[key] = step.finish
                self.errors[key] = step.error
