"""Where a machine's settings come from: a running server, a file, a hardware preset."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from turnstile.core.cost import Coefficients
from turnstile.core.settings import SchedulerConfig
from turnstile.simulate.setup import Front, Setup
from turnstile.simulate.timing import LinearTiming, finite

FORMAT = "turnstile-calibration-1"
ENOUGH = 200
"""Steps a fit should have seen."""

_PARTS = {
    "alpha": "step",
    "beta": "token",
    "gamma": "query_key_pair",
    "delta": "sequence",
    "epsilon": "decode_read",
    "zeta": "shared_read",
}


class CalibrationError(ValueError):
    """The machine cannot be learned from this; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What is known of a real machine.

    Attributes
    ----------
    source
        Where it comes from, for reports.
    coefficients
        Of whole turns of the step loop.
    passes
        Of the forward passes alone, as the server's scheduler knows them: it cuts prompts by these.
        None where that is not known.
    samples
        Steps they were fitted to; 0 where it was not to steps.
    largest_batch
        Most sequences in one of them; 0 where nobody has said.
    draft_tokens, accepted_tokens, generated_tokens
        Tokens that the machine has guessed, how many of them were right, and how many it has given
        to its clients in all; 0 where it guesses none, or nobody has said.
    engine
        Settings of its engine that the simulator takes over unless told otherwise: ``page_size``,
        ``num_pages``, ``max_num_seqs``, ``max_num_batched_tokens``, ``max_model_len``,
        ``admission``, ``scheduling_policy``, ``preemption``, ``enable_prefix_caching``,
        ``target_itl``, ``neighbour_steps``, and the bounds of its gate.
    """

    source: str
    coefficients: Coefficients
    passes: Coefficients | None = None
    samples: int = 0
    largest_batch: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    generated_tokens: int = 0
    front: Front = field(default_factory=Front)
    engine: dict[str, Any]

    def describe(self) -> str:
        """Where it comes from, and how far what was measured reaches, in a line; and in another, a
        warning where that is not what is simulated.
        """
        text = f"calibrated from {self.source}"
        if self.samples:
            text += f"; fitted to {self.samples} steps"
        if self.largest_batch:
            text += f"{' of' if self.samples else '; with'} up to {self.largest_batch} sequences"
        if self.draft_tokens:
            text += f"\n{self._warn_of_guesses()}"
        return text

    def _warn_of_guesses(self) -> str:
        """Say what is off where the server guesses, and by how much as far as its counters tell."""
        drawn = self.generated_tokens - self.accepted_tokens
        times = "more steps here than there"
        if drawn > 0:
            times = f"about {self.generated_tokens / drawn:.2f} times as many steps here as there"
        return (
            f"warning: the server guesses tokens ({self.accepted_tokens} of {self.draft_tokens} "
            f"were right), and here nothing is guessed: answers take {times} "
            "under the load that it has had, steps lack the rows of guesses, and admission counts "
            "on all who decode to advance alike. Learn from a server without --spec-method and "
            "--speculative-config."
        )

    @classmethod
    def of(cls, content: dict[str, Any]) -> Calibration:
        """Undo :func:`dataclasses.asdict`. Raises :class:`ValueError` where it makes no sense."""
        coefficients = finite(Coefficients(**content["coefficients"]))
        passes = content.get("passes")
        return cls(
            **content
            | {
                "coefficients": coefficients,
                "passes": finite(Coefficients(**passes)) if passes else None,
                "front": Front(**content["front"]),
            }
        )

    def scaled(self, pace: float) -> Calibration:
        """The same machine, all of whose steps take ``pace`` times as long."""
        return replace(
            self,
            coefficients=self.coefficients.scaled(pace),
            passes=self.passes.scaled(pace) if self.passes else None,
        )

    def write(self, path: Path) -> None:
        """Keep it for :func:`read_calibration`."""
        path.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")


ENGINE_SETTINGS = (
    "page_size", "num_pages", "max_num_seqs", "max_num_batched_tokens", "max_model_len",
    "admission", "scheduling_policy", "preemption", "enable_prefix_caching", "target_itl",
    "neighbour_steps",
)  # fmt: skip
GATE_SETTINGS = ("max_num_queued_reqs", "max_num_queued_tokens", "max_queue_wait")


def calibrated(known: Calibration) -> Setup:
    """The machine a calibration describes."""
    engine = known.engine
    slots = int(engine.get("max_num_seqs") or 128)
    return Setup(
        timing=LinearTiming(known.coefficients),
        believes=known.passes,
        measured_batch=known.largest_batch or None,
        num_pages=int(engine["num_pages"]),
        page_size=int(engine["page_size"]),
        admission=engine.get("admission") or "expected",
        policy=engine.get("scheduling_policy") or "fair",
        preemption=engine.get("preemption") or "fair",
        prefix_caching=bool(engine.get("enable_prefix_caching", True)),
        scheduler=SchedulerConfig(
            max_num_seqs=slots,
            max_num_batched_tokens=int(engine.get("max_num_batched_tokens") or max(768, slots)),
            max_model_len=int(engine.get("max_model_len") or 8192),
            target_itl=engine.get("target_itl"),
            neighbour_steps=float(engine.get("neighbour_steps", 2.0)) or None,
        ),
        front=known.front,
        max_num_queued_reqs=engine.get("max_num_queued_reqs"),
        max_num_queued_tokens=engine.get("max_num_queued_tokens"),
        max_queue_wait=engine.get("max_queue_wait") or None,
    )


def ask_server(url: str, api_key: str | None = None) -> Calibration:
    """Learn from a running server: ``/metrics`` for what steps cost, ``/server_info`` for the rest.

    Raises
    ------
    CalibrationError
        Nobody answers, it is no Turnstile, or it has not measured enough steps yet.
    """
    base = url.rstrip("/").removesuffix("/v1")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with httpx.Client(base_url=base, headers=headers, timeout=10.0) as client:
            metrics, info = client.get("/metrics"), client.get("/server_info")
            metrics.raise_for_status()
            info.raise_for_status()
            told = info.json()
    except (httpx.HTTPError, ValueError) as error:
        raise CalibrationError(f"{base} cannot be asked: {error}") from None
    return learn(base, metrics.text, told)


def learn(base: str, metrics: str, told: dict[str, Any]) -> Calibration:
    """What a server's ``/metrics`` and ``/server_info`` say of it. Raises as :func:`ask_server`."""
    coefficients, samples = parse_costs(metrics, "turn"), _gauge(metrics, "turnstile_cost_samples")
    if samples < ENOUGH:
        raise CalibrationError(
            f"{base} has measured {samples} steps; at least {ENOUGH} are needed. "
            "Send it work first: turnstile bench serve."
        )
    engine = (told.get("engine_config") or {}) | (told.get("engine") or {})
    missing = [name for name in ("num_pages", "page_size") if not engine.get(name)]
    if missing:
        raise CalibrationError(f"{base}/server_info does not tell {' and '.join(missing)}.")
    kept = {name: engine[name] for name in ENGINE_SETTINGS if name in engine}
    door = told.get("server") or {}
    kept |= {name: door[name] for name in GATE_SETTINGS if name in door}
    source = f"{engine.get('model')} at {base}"
    return Calibration(
        source=source, coefficients=_sensible(coefficients),
        passes=_sensible(parse_costs(metrics, "step")), samples=samples, engine=kept,
        largest_batch=_gauge(metrics, "turnstile_cost_largest_batch"),
        draft_tokens=_gauge(metrics, "turnstile_draft_tokens_total"),
        accepted_tokens=_gauge(metrics, "turnstile_accepted_draft_tokens_total"),
        generated_tokens=_gauge(metrics, "turnstile_generated_tokens_total"),
    )  # fmt: skip


def parse_costs(metrics: str, of: str) -> Coefficients:
    """The fitted cost of a whole ``"turn"`` of the step loop, or of its forward pass (``"step"``),
    out of a Prometheus exposition.

    Raises
    ------
    CalibrationError
        They are not in there.
    """
    values: dict[str, Any] = {}
    for name, part in _PARTS.items():
        line = re.search(
            rf'^turnstile_{of}_cost_seconds{{per="{part}"}} (\S+)$', metrics, re.MULTILINE
        )
        if line is None:
            raise CalibrationError(f"The metrics have no turnstile_{of}_cost_seconds.")
        values[name] = float(line.group(1))
    values["knee"] = _gauge(metrics, f"turnstile_{of}_cost_knee_tokens")
    return Coefficients(**values)


def _sensible(coefficients: Coefficients) -> Coefficients:
    try:
        return finite(coefficients)
    except ValueError as error:
        raise CalibrationError(str(error)) from None


def _gauge(metrics: str, name: str) -> int:
    """A gauge or counter without labels; 0 where there is none."""
    found = re.search(rf"^{name} (\S+)$", metrics, re.MULTILINE)
    return int(float(found.group(1))) if found else 0


def read_calibration(path: Path) -> Calibration:
    """Read what :meth:`Calibration.write` wrote. Raises :class:`CalibrationError`."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CalibrationError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise CalibrationError(f"{path} is no calibration ({FORMAT}).")
    try:
        return Calibration.of(content)
    except (KeyError, TypeError, ValueError) as error:
        raise CalibrationError(f"{path}: {error}") from None
