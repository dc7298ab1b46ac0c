"""Counter-based randomness: a draw depends on (seed, sample, position) and nothing else.

There is no generator state to save, so a preempted, resumed or resubmitted sequence draws what it
would have drawn, in any batch, on any engine.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1


def uniform(seed: int, sample: int, position: int) -> float:
    """A float in [0, 1) with 53 random bits, from three rounds of the SplitMix64 finalizer
    (Steele, Lea and Flood, OOPSLA 2014).
    """
    state = _mix(seed & _MASK)
    state = _mix(state ^ (sample & _MASK))
    state = _mix(state ^ (position & _MASK))
    return (state >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
