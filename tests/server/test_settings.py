"""Settings of the server that cannot work are refused before it listens, by their flags."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from turnstile.server.config import ConfigError, ServerConfig


# B75: a preflight carries no key; only allowed origins get headers; refusals carry them too.
@pytest.mark.parametrize(
    ("origin", "taken"),
    [("*", True), ("null", True), ("https://ops.example", True), ("http://[::1]:8080/", True),
     ("chrome-extension://abcdef", True), ("ops.example", False), ("https://*.example", False),
     ("https://ops.example/chat", False), ("https://Ops.Example", False), ("", False)],
)  # fmt: skip
def test_an_origin_that_no_browser_sends_is_refused_at_the_start(origin: str, taken: bool) -> None:
    config = ServerConfig(allowed_origins=[origin])
    with nullcontext() if taken else pytest.raises(ConfigError, match="--allowed-origins"):
        config.check()


def test_a_model_cannot_be_served_under_an_empty_name() -> None:
    with pytest.raises(ConfigError, match="--served-model-name is empty"):
        ServerConfig(served_model_name=["good", " "]).check()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_an_open_address_needs_a_key_or_a_clear_word(host: str) -> None:
    with pytest.raises(ConfigError, match="--api-key"):
        ServerConfig(host=host).check()
    ServerConfig(host=host, api_key=["k"]).check()
    ServerConfig(host=host, allow_unauthenticated=True).check()
    ServerConfig(host=host, uds="/tmp/socket").check()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.0.0.9"])
def test_loopback_needs_no_key(host: str) -> None:
    ServerConfig(host=host).check()


@pytest.mark.parametrize("keys", [[""], ["  "], ["schlüssel"], ["a\nb"]])
def test_unusable_keys_are_refused_at_start(keys: list[str]) -> None:
    with pytest.raises(ConfigError):
        ServerConfig(api_key=keys).check()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_choices", 0), ("default_max_tokens", 0), ("stream_interval", 0),
        ("keep_alive_timeout", 0), ("body_timeout", 0), ("stalled_reader_timeout", -1),
        ("default_timeout", 0), ("max_stop_strings", -1), ("max_logprobs", -1),
        ("max_num_queued_reqs", -1), ("max_num_queued_tokens", -1),
        ("sse_keep_alive_interval", -1), ("shutdown_timeout", -1), ("log_stats_interval", -1),
        ("shutdown_timeout", float("inf")), ("default_timeout", float("nan")),
    ],
)  # fmt: skip
def test_a_flag_out_of_its_range_is_named(name: str, value: float) -> None:
    ServerConfig().check()
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} must be at least"):
        ServerConfig(**{name: value}).check()  # type: ignore[arg-type]
