"""Small machines and loads for the simulator's tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from turnstile.core.cost import Coefficients
from turnstile.core.settings import SchedulerConfig
from turnstile.simulate.load import Load
from turnstile.simulate.setup import Front, Setup
from turnstile.simulate.timing import LinearTiming, StepTiming, StepWork

COEFFICIENTS = Coefficients(alpha=1e-2, beta=1e-3, gamma=0.0, delta=0.0)


def setup(
    *, pages: int = 1000, page_size: int = 16, front: Front | None = None, **settings: Any
) -> Setup:
    """A machine whose steps take 10 ms and 1 ms a token; ``settings`` go to both configs."""
    known = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 4096}
    names = SchedulerConfig.__dataclass_fields__
    return Setup(
        timing=settings.pop("timing", LinearTiming(COEFFICIENTS)),
        num_pages=pages,
        page_size=page_size,
        front=front or Front(),
        scheduler=SchedulerConfig(
            **(known | {k: settings.pop(k) for k in list(settings) if k in names})
        ),
        **settings,
    )


def arrivals(*requests: tuple[float, int, int]) -> Load:
    """Requests as (due, prompt tokens, output tokens)."""
    due, prompts, outputs = zip(*requests, strict=True)
    return Load(
        "test",
        np.asarray(prompts, dtype=np.int64),
        np.asarray(outputs, dtype=np.int64),
        due=np.asarray(due, dtype=np.float64),
    )


class ScatteredTiming:
    """Another timing, with log-normal scatter of mean 1 around it.

    The factor of a step depends on the seed and the step's number alone.

    Parameters
    ----------
    spread
        Standard deviation of the factor's logarithm.
    """

    _BLOCK = 4096

    def __init__(self, timing: StepTiming, spread: float, seed: int) -> None:
        self._timing = timing
        self._spread = spread
        self._seed = seed
        self._blocks: dict[int, list[float]] = {}

    @property
    def coefficients(self) -> Coefficients:
        return self._timing.coefficients

    def seconds(self, work: StepWork, step: int) -> float:
        block, at = divmod(step, self._BLOCK)
        factors = self._blocks.get(block)
        if factors is None:
            rng = np.random.default_rng([self._seed, block])
            normal = rng.standard_normal(self._BLOCK) * self._spread - self._spread**2 / 2
            factors = self._blocks[block] = np.exp(normal).tolist()
        return self._timing.seconds(work, step) * factors[at]
