"""Every sequence that is alive, by the request it belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq

from turnstile.core.request import DuplicateRequestError, Request, Sequence


class Alive:
    """The samples of each request, from their submission (or fork) to their end."""

    def __init__(self) -> None:
        self._of: dict[str, list[Sequence]] = {}
        self._arrivals = 0

    def __iter__(self) -> Iterator[Sequence]:
        """All of them, request by request."""
        return (sequence for group in self._of.values() for sequence in group)

    def of(self, request_id: str) -> list[Sequence]:
        """The live samples of a request (a copy), empty if there is none."""
        return list(self._of.get(request_id, ()))

    def add(
        self, request: Request, index: int, outputs: Seq[int] = (), charged: float = 0.0
    ) -> Sequence:
        """Bring a sample to life: the youngest of all."""
        self._arrivals += 1
        sequence = Sequence(request, index, outputs, charged=charged, arrival_order=self._arrivals)
        self._of.setdefault(request.id, []).append(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """A sample has ended; its request with the last of them."""
        group = self._of[sequence.request.id]
        group.remove(sequence)
        if not group:
            del self._of[sequence.request.id]

    def replace(self, request_id: str, samples: list[Sequence]) -> None:
        """Of a request these samples are alive."""
        self._of[request_id] = samples

    def rebuild(self, sequences: Iterable[Sequence]) -> None:
        """Write the book anew: these are alive."""
        sequences = list(sequences)
        self._of.clear()
        for sequence in sequences:
            self._of.setdefault(sequence.request.id, []).append(sequence)

    def check_new(self, request_id: str, samples: range) -> None:
        """Raise :class:`DuplicateRequestError` where one of ``samples`` is alive, or is to come
        from the fork of one that is.
        """
        for other in self._of.get(request_id, ()):
            if other.index < samples.stop and samples.start < other.index + other.fork_width:
                raise DuplicateRequestError(
                    f"Sample {other.index} of a request with the id {request_id!r} is running "
                    "already; an id can be used again once its request has ended."
                )
