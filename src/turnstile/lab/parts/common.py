"""What the parts that compare policies share: the same requests under each, on the engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from turnstile.lab.continuous import ContinuousServer
from turnstile.lab.drive import Answer, Run, drive
from turnstile.lab.load import Ask
from turnstile.lab.model import LabModel
from turnstile.lab.policies import Policy


@dataclass(frozen=True, slots=True)
class Served:
    """A policy, its run, and the server as the run has left it."""

    policy: Policy
    run: Run
    server: ContinuousServer

    @property
    def recomputed(self) -> int:
        """Tokens that were computed, given up and computed again."""
        return self.server.scheduler.statistics.recomputed_tokens

    def of(self, tenant: str) -> list[Answer]:
        """The answers of one tenant."""
        return [a for a in self.run.answers.values() if a.ask.tenant == tenant]


def compare(
    model: LabModel,
    policies: Iterable[Policy],
    asks: Iterable[Ask],
    *,
    memory_tokens: int,
    max_model_len: int,
    slots: int = 64,
    budget: int = 128,
) -> list[Served]:
    """Run the same requests under each policy, in the same memory."""
    listed = list(asks)
    outcomes = []
    for policy in policies:
        server = ContinuousServer(
            model, policy, memory_tokens=memory_tokens, max_model_len=max_model_len, slots=slots,
            budget=budget, watched=True,
        )  # fmt: skip
        outcomes.append(Served(policy, drive(server, listed, seconds=model.seconds), server))
    return outcomes


def wrong(right: Run, other: Run) -> dict[str, int]:
    """Requests whose tokens differ, and the index of the first that does."""
    found = {}
    for name, answer in right.answers.items():
        pairs = zip(answer.tokens, other.answers[name].tokens, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if first is not None:
            found[name] = first
    return found
