"""Learn a machine from what ``bench serve`` measured: any server's, also one that is not ours.

A file with figures tells less than a server does: how long things took, not why. So the cost of a
step, of a prompt token and of a sequence are searched for that make the same load, simulated, end
with the same figures. One file at one load leaves much open; what is far from that load is a guess.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from turnstile.bench.lengths import Fixed, LengthDistribution, Lognormal, Quantiles, Uniform
from turnstile.bench.session import FORMAT
from turnstile.bench.workloads import Workload
from turnstile.core.cost import Coefficients
from turnstile.simulate.calibrate import Calibration, CalibrationError, calibrated
from turnstile.simulate.fit import Parameters, descend, distance
from turnstile.simulate.load import Load, from_workload
from turnstile.simulate.run import Plant, simulate

_KINDS: tuple[tuple[frozenset[str], type[Any]], ...] = (
    (frozenset({"tokens"}), Fixed),
    (frozenset({"low", "high"}), Uniform),
    (frozenset({"median", "sigma", "low", "high"}), Lognormal),
    (frozenset({"percents", "values", "cap"}), Quantiles),
)


def is_result(path: Path) -> bool:
    """Whether a file says of itself that ``bench`` wrote it."""
    try:
        result: Any = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError):
        return False
    return isinstance(result, dict) and result.get("format") == FORMAT


def read_result(path: Path) -> dict[str, Any]:
    """A result of ``bench serve``. Raises :class:`CalibrationError` for anything else."""
    try:
        result: Any = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise CalibrationError(f"{path} cannot be read: {error}") from None
    if not isinstance(result, dict) or result.get("format") != FORMAT or "median" not in result:
        raise CalibrationError(f"{path} is no result of turnstile bench serve.")
    return result


def load_of(result: Mapping[str, Any]) -> Load:
    """The requests that were sent, length by length.

    Raises
    ------
    CalibrationError
        They came from a file or were conversations, whose lengths the result does not tell.
    """
    told = dict(result["workload"])
    if told.get("dataset") or told.get("turns") or told.get("ramp"):
        raise CalibrationError(
            "Only drawn, single questions at a constant load can be learned from."
        )
    known = {
        name: told[name] for name in ("name", "summary", "requests", "prefix", "users", "rate")
    }
    for name in ("prefix_groups", "burstiness"):
        known[name] = told.get(name, 1)
    workload = Workload(prompt=_lengths(told["prompt"]), output=_lengths(told["output"]), **known)
    return from_workload(workload, int(result["length_seed"]))


def _lengths(told: Mapping[str, Any]) -> LengthDistribution:
    for names, kind in _KINDS:
        if names == set(told):
            values = {k: tuple(v) if isinstance(v, list) else v for k, v in told.items()}
            distribution: LengthDistribution = kind(**values)
            return distribution
    raise CalibrationError(f"The lengths {sorted(told)} are of no kind that is known.")


def fit_result(
    result: Mapping[str, Any], engine: Mapping[str, Any], source: str, rounds: int = 6
) -> tuple[Calibration, float]:
    """The machine that would have measured ``result``, with these engine settings.

    Returns the calibration and what is left of the distance between the figures.
    """
    load, measured = load_of(result), result["median"]
    if not measured.get("completed"):
        raise CalibrationError(f"{source}: no request was completed; there is nothing to learn.")

    def apply(parameters: Parameters) -> Calibration:
        fit = Coefficients(parameters["step"], parameters["token"], 0.0, parameters["sequence"])
        return Calibration(source=source, coefficients=fit, engine=dict(engine))

    def loss(parameters: Parameters) -> float:
        return distance(simulate(Plant(calibrated(apply(parameters))), load), measured)

    best, least = descend(loss, _guess(load, measured), factor=2.0, rounds=rounds)
    known = apply(best)
    peak = simulate(Plant(calibrated(known)), load)["machine"]["peak_batch"]
    return replace(known, largest_batch=peak), math.sqrt(least)


def _guess(load: Load, measured: Mapping[str, Any]) -> Parameters:
    """A step takes as long as a gap between tokens: half of it for being one, the rest by rows."""
    gap = (measured["itl_ms"]["p50"] or measured["tpot_ms"]["p50"] or 10.0) / 1000.0
    tokens = float(load.outputs.sum())
    running = max(1.0, tokens * gap / max(1e-9, measured["duration_s"]))
    if not np.isfinite(running):
        running = 1.0
    return {"step": gap / 2, "token": gap / 8 / running, "sequence": gap / 4 / running}
