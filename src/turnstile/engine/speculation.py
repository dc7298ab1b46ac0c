"""Which drafts a configuration asks for: :func:`drafter_of`. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from turnstile.core.speculation import Drafter, PromptLookup

if TYPE_CHECKING:
    from turnstile.engine.config import EngineConfig

MOST_TOKENS = 32
"""Most tokens of a draft that can be asked for."""
LONGEST_LOOKUP = 64


class SpeculativeConfigError(ValueError):
    """The drafts asked for cannot be made; the message names the flag and the limit."""


class SpeculativeConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``--speculative-config``, with the names users of this field know."""

    method: str = "ngram"
    num_speculative_tokens: int = 8
    prompt_lookup_min: int = 3
    prompt_lookup_max: int = 12

    def check(self, flag: str) -> None:
        """Raise :class:`SpeculativeConfigError` for the first value that is out of its range."""
        if self.method not in ("none", "ngram"):
            raise SpeculativeConfigError(
                f"{flag}: method {self.method!r} is not known; there are 'ngram' and 'none'."
            )
        for name, low, high in (
            ("num_speculative_tokens", 1, MOST_TOKENS),
            ("prompt_lookup_min", 1, LONGEST_LOOKUP),
            ("prompt_lookup_max", 1, LONGEST_LOOKUP),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise SpeculativeConfigError(
                    f"{flag}: {name} must be between {low} and {high}, not {value}."
                )
        if self.prompt_lookup_max < self.prompt_lookup_min:
            raise SpeculativeConfigError(
                f"{flag}: prompt_lookup_max ({self.prompt_lookup_max}) is less than "
                f"prompt_lookup_min ({self.prompt_lookup_min})."
            )


def speculation_of(config: EngineConfig) -> SpeculativeConfig:
    """What the three flags say together.

    Raises
    ------
    SpeculativeConfigError
        They contradict each other, or one is out of its range.
    """
    if config.speculative_config is None:
        chosen = SpeculativeConfig(method=config.spec_method)
        if config.spec_tokens is not None:
            if config.spec_method == "none":
                raise SpeculativeConfigError("--spec-tokens needs --spec-method ngram.")
            chosen.num_speculative_tokens = config.spec_tokens
        chosen.check("--spec-tokens")
        return chosen
    if config.spec_method != "none" or config.spec_tokens is not None:
        raise SpeculativeConfigError(
            "--speculative-config says all of it: leave out --spec-method and --spec-tokens."
        )
    flag = "--speculative-config"
    try:
        chosen = msgspec.json.decode(config.speculative_config, type=SpeculativeConfig)
    except msgspec.MsgspecError as error:
        raise SpeculativeConfigError(f"{flag}: {error}.") from error
    chosen.check(flag)
    return chosen


def drafter_of(config: EngineConfig) -> Drafter | None:
    """Who makes the drafts; None where none are asked for. Raises as :func:`speculation_of`."""
    chosen = speculation_of(config)
    if chosen.method == "none":
        return None
    return PromptLookup(
        chosen.num_speculative_tokens, chosen.prompt_lookup_min, chosen.prompt_lookup_max
    )


def most_draft_tokens(config: EngineConfig) -> int:
    """Tokens of a draft at most; 0 where none are made. Raises as :func:`speculation_of`."""
    chosen = speculation_of(config)
    return 0 if chosen.method == "none" else chosen.num_speculative_tokens
