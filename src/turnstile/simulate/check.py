"""Real runs against simulated ones: what was measured, the same simulated, and the table of both.

The runs come in rounds: new servers, every load once, W1 first, and W1 once more at the end. All is
simulated with what W1 has taught and nothing else: how steps compare with each other by the W1 of
all rounds, and how long they take by the two of the round, between which the machine's pace is
taken to have moved evenly. Real medians over the rounds stand against simulated ones
(:mod:`turnstile.simulate.verdict`). ``scripts/validate_simulator.py`` makes the real runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from turnstile.simulate.calibrate import Calibration, calibrated
from turnstile.simulate.cases import FIRST, Case, cases
from turnstile.simulate.figures import Figures, measure
from turnstile.simulate.run import Plant, play
from turnstile.simulate.timing import MeanTiming, RecordedTiming, StepTiming
from turnstile.simulate.verdict import Verdict, mean_step, pace_of, values, verdicts

FORMAT = "turnstile-simulator-check-5"


class CheckError(ValueError):
    """This is no check that can be judged; the message says why."""


@dataclass(frozen=True)
class Round:
    """Every load once, one after another, and W1 again.

    Attributes
    ----------
    known
        What W1 has taught of the machine, in this round: what steps cost is the server's fit after
        the first W1, at the pace of that.
    rate
        Of the Poisson arrivals: 80 % of what this W1 got through.
    runs
        Figures of each run, by the name of its case; with how many ``steps`` and ``preemptions``
        it had, the seconds of each step (``turns_s``) and of all of them (``busy_s``), and the
        second of the round in the middle of it (``middle_s``).
    before
        The cases that each run's server had had before, by the name of its case.
    again
        Figures of the second W1, after all other loads.
    """

    known: Calibration
    rate: float
    runs: dict[str, Figures]
    before: dict[str, list[str]]
    again: Figures

    @property
    def moved(self) -> float:
        """How many times as long steps took in the second W1."""
        return pace_of(self.again, self.runs[FIRST])

    def pace(self, name: str) -> float:
        """How many times as long as in the first W1 steps take when this case runs, if the pace
        moves evenly from that to the second.
        """
        first: float = self.runs[FIRST]["middle_s"]
        last: float = self.again["middle_s"]
        passed: float = (self.runs[name]["middle_s"] - first) / (last - first)
        return 1.0 + passed * (self.moved - 1.0)


@dataclass(frozen=True)
class Measured:
    """All that was measured."""

    when: str
    cores: int
    requests: int
    """Of each run."""
    rounds: list[Round]

    def write(self, path: Path, **more: Any) -> None:
        """Keep it for :meth:`read`, with whatever else is of interest."""
        path.write_text(json.dumps({"format": FORMAT} | asdict(self) | more, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Measured:
        """What :meth:`write` wrote. Raises :class:`CheckError`."""
        try:
            content = json.loads(path.read_text("utf-8"))
            if content.pop("format", None) != FORMAT:
                raise CheckError(f"{path} is not of the format {FORMAT}.")
            names = cls.__dataclass_fields__
            told = {name: content[name] for name in names}
            told["rounds"] = [
                Round(**each | {"known": Calibration.of(each["known"])}) for each in told["rounds"]
            ]
        except (OSError, KeyError, TypeError) as error:
            raise CheckError(f"{path} cannot be read: {error}") from None
        return cls(**told)


@dataclass
class Outcome:
    """The real runs of a case, and a simulated one for each, after the same history.

    ``told`` is what is simulated where the seconds of each step are those of the real run: a
    diagnosis of what is wrong besides.
    """

    case: Case
    real: list[Figures] = field(default_factory=list)
    simulated: list[Figures] = field(default_factory=list)
    told: list[Figures] = field(default_factory=list)

    @property
    def verdicts(self) -> list[Verdict]:
        """Of all its figures."""
        return verdicts(self.real, self.simulated)


def simulate_all(measured: Measured, tell: Callable[[str], None]) -> list[Outcome]:
    """Every run once more, at the pace that W1 says the machine had then."""
    outcomes: dict[str, Outcome] = {}
    timings = common_timings(measured.rounds)
    for number, (each, timing) in enumerate(zip(measured.rounds, timings, strict=True), start=1):
        tell(f"simulating round {number} of {len(measured.rounds)}")
        planned = {case.name: case for case in cases(measured.requests, each.rate)}
        for name, case in planned.items():
            if name not in each.runs:
                continue
            real = each.runs[name]
            outcome = outcomes.setdefault(name, Outcome(case))
            before = [planned[b] for b in each.before[name]]
            pace = each.pace(name)
            known, ours = each.known.scaled(pace), timing.scaled(pace)
            outcome.real.append(real)
            outcome.simulated.append(simulate_run(case, known, before, ours))
            recorded = RecordedTiming(real["turns_s"], ours)
            outcome.told.append(simulate_run(case, known, before, recorded))
    return list(outcomes.values())


def at_pace(known: Calibration, first: Case, real: Figures) -> Calibration:
    """The machine with all its steps longer or shorter by one factor, so that those of W1 take as
    long in the mean as they did: the server's fit also has the pace of the stairs before it in it.
    """
    return known.scaled(pace_of(real, simulate_run(first, known, [])))


def common_timings(rounds: Seq[Round]) -> list[MeanTiming]:
    """What steps take in the first W1 of each round: how they compare with each other is the
    machine's, and learned from all rounds; how fast it was is the round's.

    One W1 has a second or two of small steps, and the machine's pace in those would count as what
    small steps cost.
    """
    steps = [mean_step(each.runs[FIRST]) for each in rounds]
    fits = [each.known.coefficients for each in rounds]
    return [
        MeanTiming(
            tuple(fit.scaled(own / theirs) for fit, theirs in zip(fits, steps, strict=True)),
            each.known.coefficients,
        )
        for each, own in zip(rounds, steps, strict=True)
    ]


def simulate_run(
    case: Case, known: Calibration, before: Seq[Case], timing: StepTiming | None = None
) -> Figures:
    """Figures of a case on the machine that is known; or on one whose steps take so long."""
    setup = replace(calibrated(known), past_outputs=case.answers_before(before))
    if case.num_pages is not None:
        setup = replace(setup, num_pages=case.num_pages)
    if timing is not None:
        setup = replace(setup, timing=timing)
    load = case.load()
    history = play(Plant(setup), load)
    figures = measure(history, load, setup.num_pages, None)
    counted = {"steps": history.steps, "busy_s": history.busy, "preemptions": history.preemptions}
    return figures | counted


def table(outcomes: Seq[Outcome], measured: Measured) -> str:
    """What was measured and simulated, figure by figure, as Markdown."""
    lines = [
        _describe(measured),
        "",
        "| run | figure | real | simulated | error | allowed | |",
        "|---|---|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        case = outcome.case
        for number, v in enumerate(outcome.verdicts):
            name = f"**{case.name}**: {case.about}" if number == 0 else ""
            allowed = f"{v.allowed:.0%}{' (spread)' if v.allowed > v.tolerance else ''}"
            mark = "ok" if v.right else "**off**"
            cells = (
                name, v.label, _told(v.real), _told(v.simulated), f"{v.error:+.1%}", allowed, mark,
            )  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
        for counted in ("preemptions", "steps"):
            real, ours = (values(runs, (counted,)) for runs in (outcome.real, outcome.simulated))
            lines.append(f"| | {counted} | {_told(real)} | {_told(ours)} | | | |")
        paces = map(pace_of, outcome.real, outcome.simulated)
        lines.append(f"| | pace of the steps | {_told(paces)} | 1 | | | |")
    again = _told(each.moved for each in measured.rounds)
    lines += ["", f"{FIRST} at the end of a round, steps against those of the first: {again}."]
    return "\n".join([*lines, "", _sum_up(outcomes)]) + "\n"


def _sum_up(outcomes: Seq[Outcome]) -> str:
    judged = [v for outcome in outcomes for v in outcome.verdicts]
    told = [v for outcome in outcomes for v in verdicts(outcome.real, outcome.told)]
    return (
        f"{sum(v.right for v in judged)} of {len(judged)} figures within what is allowed, "
        f"{sum(abs(v.error) <= v.tolerance for v in judged)} of them within the tolerance itself; "
        f"{sum(abs(v.error) <= max(v.tolerance, v.spread) for v in judged)} within the tolerance "
        "or the whole spread of the real runs. "
        "Where the simulator is told the seconds of each step, "
        f"{sum(abs(v.error) <= v.tolerance for v in told)} are within the tolerance itself, and "
        f"{sum(abs(v.error) <= 0.02 for v in told)} within 2 %."
    )


def _describe(measured: Measured) -> str:
    """What was measured, and what each W1 has taught, in a paragraph."""
    fits = [each.known.coefficients for each in measured.rounds]
    fronts = [each.known.front for each in measured.rounds]
    steps, tokens = _told(f.alpha * 1e3 for f in fits), _told(f.beta * 1e6 for f in fits)
    pairs, sequences = _told(f.gamma * 1e9 for f in fits), _told(f.delta * 1e6 for f in fits)
    reads = _told((f.gamma if f.epsilon is None else f.epsilon) * 1e9 for f in fits)
    shared = _told((f.zeta or 0.0) * 1e9 for f in fits)
    knees = _told(f.knee for f in fits)
    return (
        f"{measured.requests} requests a run, {len(measured.rounds)} rounds of every load, "
        f"measured {measured.when} UTC, {measured.cores} cores, client on the same cores. "
        f"What W1 has taught in each round: {steps} ms a step, {tokens} µs a token (but {knees} "
        f"cost as many as fewer), {pairs} ns a query-key pair of a prompt, {reads} ns a token that "
        f"decoding rows read and {shared} ns one that another row has read, {sequences} µs a "
        "sequence; "
        f"{_told(f.per_request * 1e6 for f in fronts)} µs a request at the door and a first or "
        f"last token, {_told(f.delivery * 1e3 for f in fronts)} ms to the client and "
        f"{_told(f.per_row * 1e6 for f in fronts)} µs for each row of the step. "
        f"Poisson arrivals: {_told(each.rate for each in measured.rounds)} a second."
    )


def _told(numbers: Iterable[float]) -> str:
    """What was measured or simulated, once where it is always the same."""
    texts = [f"{number:.4g}" for number in numbers]
    return " / ".join(texts if len(set(texts)) > 1 else texts[:1])


def right(outcomes: Iterable[Outcome]) -> bool:
    """Whether every figure is within what is allowed."""
    return all(v.right for outcome in outcomes for v in outcome.verdicts)
