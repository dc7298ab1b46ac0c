"""The messages between the API process and the engine process.

Everything travels as msgpack arrays. The API process sends one :class:`Commands` whenever it has
something to say; the engine answers with one :class:`StepResult` a step. Two numbers keep the
stream right across a crash:

* ``epoch`` counts the engine processes a supervisor has started. What carries an older epoch is
  stale and dropped.
* ``Row.first`` is the index of the row's first token among the sample's outputs. The journal
  takes a token only at the index it expects, so nothing is taken twice or out of order.

``StepResult.members`` announces who is in the step that is about to run: should the engine die in
it, those are the suspects.

Times are seconds of ``time.monotonic()``, which both processes of one machine share.

What comes by the hundred a step is not tracked by the garbage collector (``gc=False``): none of it
can be part of a cycle, and looking at it costs a collection as much as making it did.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import msgspec

from turnstile.engine.params import SamplingParams

PRELOAD = "--preload"
"""Tells a new engine process to import what it computes with before it reads its setup."""

SUPERVISORS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Stopping is the supervisor's to decide: a Ctrl-C in the terminal, or a SIGTERM to the whole
group, reaches the engine's process too, and streams must be able to drain. It is born with them
blocked, or they would end it while it imports.
"""

# -- API process to engine --------------------------------------------------------------------


class Submit(msgspec.Struct, array_like=True, tag="submit"):
    """One sample to compute, or ``n`` that fork from one prompt.

    ``n > 1`` only when no sample has any output yet; ``sample_index`` is then 0. A sample that is
    resumed carries ``outputs`` so far, and ``charged``: what its tenant has paid for it already.
    ``served`` is the tenant's virtual counter in the engine that died; None for what is new.
    ``number`` is what the sample is called in :class:`Draws`, the others of ``n`` with the numbers
    that follow; None where all is to be said in rows.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int
    n: int = 1
    sample_index: int = 0
    outputs: list[int] = []
    tenant: str = "default"
    weight: float = 1.0
    priority: int = 0
    arrival: float = 0.0
    deadline: float | None = None
    salt: bytes = b""
    charged: float = 0.0
    served: float | None = None
    number: int | None = None


class Cancel(msgspec.Struct, array_like=True, tag="cancel"):
    """End a sample (or, with ``sample_index`` None, all samples of a request).

    ``reason`` is ``abort``, or ``stop`` where the API process found a stop string.
    """

    request_id: str
    sample_index: int | None = None
    reason: str = "abort"


class Control(msgspec.Struct, array_like=True, tag="control"):
    """``reset_prefix_cache``, or ``stop`` (end now)."""

    action: str


class Resume(msgspec.Struct, array_like=True, tag="resume"):
    """Go on from what an engine before counted: the virtual token counters of its ``tenants``, and
    the ``level`` to which newcomers are lifted while nobody is active. Before any Submit.
    """

    tenants: dict[str, float]
    level: float


class Watch(msgspec.Struct, array_like=True, tag="watch"):
    """Somebody looks at the live map: send a :class:`Picture` every ``interval`` seconds, the first
    one whole. None: nobody does any more.
    """

    interval: float | None


Command = Submit | Cancel | Control | Resume | Watch


class Commands(msgspec.Struct, array_like=True):
    """What the API process has to say, in order."""

    commands: list[Command]


# -- engine to API process --------------------------------------------------------------------


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """The model's own log-probability of a token, and of its likeliest alternatives."""

    logprob: float
    top: list[tuple[int, float]] = []


NOTHING_ALLOWED = (
    "No token is allowed here: the request's constraints (a grammar, allowed_token_ids, "
    "logit_bias, min_tokens) contradict each other."
)
"""The error of a row whose request leaves it nothing to draw: its client's fault, not ours."""


class Row(msgspec.Struct, array_like=True, gc=False):
    """What a step did for one sample. ``finish`` is set once, on the last row of a sample."""

    request_id: str
    sample_index: int
    first: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish: str | None = None
    error: str | None = None
    stop_token: int | None = None
    """The token id that ended it, where ``finish`` is ``stop``; it is the last of ``tokens``."""
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of prompt tokens 1… (the first has none), in pieces, in order."""
    charged: float = 0.0
    """What the tenant has paid for this sample so far."""
    drafted: int = 0
    """Draft tokens verified for it; all ``tokens`` but the last were among them."""


class Draws(msgspec.Struct, array_like=True, gc=False):
    """Rows that say no more than one token, and not the first: nearly all of a step. What would be
    a hundred objects with a dozen fields each is four columns; ``numbers`` says of which samples.
    """

    numbers: list[int] = []
    firsts: list[int] = []
    tokens: list[int] = []
    charged: list[float] = []

    def add(self, number: int, first: int, token: int, charged: float) -> None:
        """Append one."""
        self.numbers.append(number)
        self.firsts.append(first)
        self.tokens.append(token)
        self.charged.append(charged)

    def __iter__(self) -> Iterator[tuple[int, int, int, float]]:
        """Each with its number, the index of its token, the token, and what was paid by then."""
        return zip(self.numbers, self.firsts, self.tokens, self.charged, strict=True)


class FittedCost(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """``seconds = alpha + beta·tokens + gamma·Σ q·context + delta·batch`` of a step, as measured.

    ``samples`` counts the steps it was fitted to; 0 means cold. ``largest_batch`` is the most
    sequences one of them had. ``epsilon``, ``knee`` and ``zeta`` are those of the finer model
    (:mod:`turnstile.core.cost`), None and 0 where it is the plain one.
    """

    alpha: float = 0.0
    beta: float = 0.0
    gamma: float = 0.0
    delta: float = 0.0
    samples: int = 0
    largest_batch: int = 0
    epsilon: float | None = None
    knee: int = 0
    zeta: float | None = None


class Snapshot(msgspec.Struct, array_like=True, gc=False):
    """The engine at a step boundary. Counters only grow within an epoch."""

    time: float = 0.0
    step: int = 0
    step_seconds: float = 0.0
    busy_seconds: float = 0.0
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_held: int = 0
    pages_cached: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    evictions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    bad_rows: int = 0
    repairs: int = 0
    """How often the scheduler's books did not balance and were written anew."""
    step_tokens: int = 0
    waiting_by_reason: dict[str, int] = {}
    tenants: dict[str, float] = {}
    """Virtual token counter of each tenant that is active."""
    departed: dict[str, float] = {}
    """That of each tenant that was active in the snapshot before, and is no more."""
    tenant_level: float = 0.0
    """The counter to which a newcomer is lifted while nobody is active."""
    cost: FittedCost = FittedCost()
    """Of the forward passes alone."""
    turn: FittedCost = FittedCost()
    """Of whole turns of the loop: planning, committing and messages included."""
    prefill_tokens: int = 0
    """Prompt tokens that those running have still to compute."""
    unused_tokens: int = 0
    """Room in held pages that no token has been written to yet."""
    drafts: int = 0
    """Rows with drafts so far."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    """Of the ``draft_tokens``, those that were right."""
    accepted_by_place: list[int] = []
    """Those by their place in the draft; empty where nobody guesses."""


class Occupant(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Who has come into a slot; ``name`` is what the pictures that follow call it."""

    name: int
    request_id: str
    sample_index: int
    tenant: str
    prompt_tokens: int
    max_tokens: int


class Picture(msgspec.Struct, array_like=True, gc=False):
    """Pages and slots at a step boundary: all of it (``whole``), or what has changed since the
    picture before.
    """

    whole: bool
    entered: list[Occupant]
    left: list[int]
    """Names of those that have no slot any more."""
    running: list[int]
    """All who have one, in order of admission; ``computed`` and ``totals`` are theirs."""
    computed: list[int]
    """Tokens whose K and V are in the pages."""
    totals: list[int]
    """Tokens known: the prompt, and what was drawn."""
    tables: list[tuple[int, bool, list[int]]]
    """A name and pages: its page table from the beginning (True), or what it has grown by."""
    pages: list[int]
    """Pages of which ``states`` tells, a byte each (:class:`turnstile.core.pages.PageState`). The
    cached ones come last, in the order in which they will be given away, all those cached before
    going first.
    """
    states: bytes


class StepResult(msgspec.Struct, array_like=True, tag="step", gc=False):
    """The rows of the step that ended, and the members of the one that starts now.

    What ``draws`` says comes before the rows: one of these may end a sample that drew in the step.
    ``events`` are ``(kind, fields)`` of :mod:`turnstile.core.events`, in order.
    """

    epoch: int
    step: int
    rows: list[Row]
    members: list[tuple[str, int]]
    snapshot: Snapshot
    events: list[tuple[str, list[object]]] = []
    draws: Draws | None = None
    picture: Picture | None = None
    """While somebody watches, and it is time for one."""


class EngineInfo(msgspec.Struct, array_like=True, tag="ready"):
    """The engine has loaded its model and takes work."""

    epoch: int
    pid: int
    model: str
    architecture: str
    vocab_size: int
    max_model_len: int
    page_size: int
    num_pages: int
    kv_bytes: int
    kv_dtype: str
    weight_format: str
    weight_bytes: int
    num_parameters: int
    backend: str
    device: str
    threads: int
    max_num_seqs: int
    max_num_batched_tokens: int
    admission: str
    exact: bool
    load_seconds: float
    scheduling_policy: str = "fair"
    draft_tokens: int = 0
    """Tokens of a draft at most; 0 where nobody guesses."""
    prefix_caching: bool = True
    """Whether prompts that were here before may be remembered."""

    @property
    def kv_tokens(self) -> int:
        """Tokens the page pool holds."""
        return self.num_pages * self.page_size


class Loading(msgspec.Struct, array_like=True, tag="loading"):
    """How far loading has come: ``stage`` is a word, ``fraction`` 0…1."""

    epoch: int
    stage: str
    fraction: float


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """The engine cannot start (bad model file, not enough memory…). ``message`` is for people."""

    epoch: int
    message: str


EngineMessage = StepResult | EngineInfo | Loading | Failed

encode_commands = msgspec.msgpack.Encoder().encode
decode_commands = msgspec.msgpack.Decoder(Commands).decode
encode_message = msgspec.msgpack.Encoder().encode
decode_message = msgspec.msgpack.Decoder(EngineMessage).decode
