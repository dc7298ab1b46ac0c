"""How the HTTP side behaves: :class:`ServerConfig`. Its docstrings are the command line's help."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from typing import Literal


class ConfigError(ValueError):
    """The configuration cannot be used; the message says what to change."""


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/*A-Z]+/?")
_FOR_ADMINS = ("tenants", "chat_template", "trace", "uds", "seed")
_LEAST: dict[float, tuple[str, ...]] = {
    1: (
        "max_text_size", "max_choices", "default_max_tokens", "stream_interval",
        "keep_alive_timeout",
    ),
    0.001: ("body_timeout", "stalled_reader_timeout", "default_timeout"),
    0: (
        "max_stop_strings", "max_logprobs", "max_num_queued_reqs", "max_num_queued_tokens",
        "sse_keep_alive_interval", "shutdown_timeout", "log_stats_interval", "log_prompts",
    ),
}  # fmt: skip
"""The least values of flags that are numbers."""


@dataclass(kw_only=True)
class ServerConfig:
    """The HTTP side of ``turnstile serve``."""

    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs an API key."""
    port: int = 8000
    """TCP port; 0 takes any free one and prints it."""
    uds: str | None = None
    """Listen on this unix socket instead of a port."""
    served_model_name: list[str] = field(default_factory=list)
    """Name clients ask for (repeatable; the first one is reported). Default: the model's own."""
    api_key: list[str] = field(default_factory=list)
    """Key that clients must send as `Authorization: Bearer` or `x-api-key` (repeatable)."""
    admin_api_key: list[str] = field(default_factory=list)
    """Key for the administrative routes (repeatable). Default: any API key opens them."""
    tenants: str | None = None
    """TOML file with tenants: their keys, weights and limits. SIGHUP reads it again."""
    allow_unauthenticated: bool = False
    """Listen on a non-loopback address without a key. Anyone who reaches the port may use it."""
    allowed_origins: list[str] = field(default_factory=list)
    """Origin of web pages that may call this server (repeatable, `*` for all), and name of a proxy
    that it is read by where it has no key. Default: none."""
    max_body_size: int = 16 * 2**20
    """Most bytes of a request body; more is answered 413 before anything is parsed."""
    body_timeout: float = 30.0
    """Seconds a client has to send its request body."""
    max_text_size: int | None = None
    """Most characters of a conversation, and of text that is cut or only counted. Default: 16 for
    each token of the context, at least 262144."""
    max_stop_strings: int = 16
    """Most stop strings of a request."""
    max_logprobs: int = 20
    """Most alternatives reported beside a token."""
    max_choices: int = 1024
    """Most choices of one request, prompts times n."""
    max_num_queued_reqs: int | None = 1024
    """Most requests waiting to start; more are answered 503 `engine_overloaded`."""
    max_num_queued_tokens: int | None = None
    """Most prompt tokens waiting to be computed. Default: no bound but that on requests."""
    max_queue_wait: float = 60.0
    """Most seconds a request may be predicted to wait for a slot; more is answered 503. 0: any."""
    prefix_sharing: Literal["tenant", "all"] = "tenant"
    """Who shares the prefix cache: only requests with the same key, or everybody."""
    generation_config: Literal["auto", "turnstile"] = "auto"
    """Default sampling parameters: the model's own (`auto`), or temperature 1 and top_p 1."""
    seed: int | None = None
    """Seed from which requests without one get theirs. Default: seeds nobody can guess."""
    default_max_tokens: int = 16
    """Tokens a completion gets that asks for no number. A chat gets the room left."""
    chat_template: str | None = None
    """File with a chat template (Jinja) to use instead of the model's own."""
    enable_auto_tool_choice: bool = True
    """Let the model call tools of its own accord where a request brings some."""
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral"] = "auto"
    """How the model writes tool calls. Default: as its chat template asks it to."""
    reasoning_parser: Literal["auto", "none", "deepseek_r1", "qwen3"] = "auto"
    """Tell what the model thinks from what it says, by its `<think>` tags: always, never (`none`),
    or where the chat template knows them (`auto`)."""
    trust_request_chat_template: bool = False
    """Render a `chat_template` that comes with a request. Such a template can burn CPU."""
    default_timeout: float | None = None
    """Seconds after which a request ends that sets no `timeout` of its own."""
    stream_interval: int = 1
    """Tokens between two chunks of a stream; more saves CPU where clients do not watch."""
    sse_keep_alive_interval: float = 10.0
    """Seconds of silence after which a stream gets a comment line; 0 sends none."""
    stalled_reader_timeout: float = 60.0
    """Seconds a client may refuse to read its stream before the request is cancelled."""
    keep_alive_timeout: int = 75
    """Seconds an idle connection stays open."""
    shutdown_timeout: float = 30.0
    """Seconds running requests get to finish after SIGTERM or Ctrl-C; 0 aborts at once."""
    metrics_compat: Literal["vllm", "none"] = "vllm"
    """Expose the metrics under vLLM's names too."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe log lines to write."""
    log_format: Literal["auto", "color", "plain", "json"] = "auto"
    """Form of the log; `auto` is colour on a terminal and plain text elsewhere."""
    log_stats_interval: float = 10.0
    """Seconds between throughput lines; none is written while idle, 0 writes none at all."""
    log_prompts: int = 0
    """Characters of each prompt to write into the access log (JSON form). Default: never any."""
    disable_access_log: bool = False
    """Write no line per request."""
    disable_access_log_for_endpoints: str = "/health,/livez,/readyz,/ping,/metrics"
    """Paths without a line per request, separated by commas."""
    trace: str | None = None
    """File to write the timeline of steps and requests to, for Perfetto (ui.perfetto.dev)."""
    trace_max_bytes: int = 256 * 2**20
    """Size at which the trace is turned over to FILE.1; at most twice this is on disk."""
    enable_docs: bool = True
    """Serve /docs and /openapi.json."""
    enable_dashboard: bool = True
    """Serve the live map of pages and slots: its page at /, and what it shows at /live."""

    def check(self) -> None:
        """Raise :class:`ConfigError` for what cannot work, or is unsafe and not asked for."""
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port} is no port; give a number from 0 to 65535.")
        keys = (*self.api_key, *self.admin_api_key)
        if any(not key.strip() for key in keys):
            raise ConfigError("An API key is empty; give a secret, or leave the flag out.")
        if not all(key.isascii() and key.isprintable() for key in keys):
            raise ConfigError("An API key has characters that no HTTP header can carry.")
        if any(not name.strip() for name in self.served_model_name):
            raise ConfigError("--served-model-name is empty; give a name, or leave the flag out.")
        for origin in self.allowed_origins:
            if origin not in ("*", "null") and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"--allowed-origins {origin} is no origin a browser sends, so that it would "
                    "never match; write https://name or http://name:port in small letters, with "
                    "no path and no * in it, or * for all."
                )
        self._check_ranges()
        if not 0 <= self.max_queue_wait < float("inf"):
            raise ConfigError("--max-queue-wait must be a number of seconds, 0 for no bound.")
        if self.max_body_size < 1024:
            raise ConfigError("--max-body-size is below 1 KiB; no request fits.")
        if self.trace_max_bytes < 2**16:
            raise ConfigError("--trace-max-bytes is below 64 KiB; a trace is larger than that.")
        exposed = self.uds is None and not is_loopback(self.host)
        if exposed and not self.api_key and self.tenants is None and not self.allow_unauthenticated:
            raise ConfigError(
                f"Listening on {self.host} without an API key would let anyone on the network in. "
                "Add --api-key SECRET (or set TURNSTILE_API_KEY) or --tenants FILE, or say "
                "--allow-unauthenticated if something in front of this server checks who calls."
            )

    def _check_ranges(self) -> None:
        for least, names in _LEAST.items():
            for name in names:
                value = getattr(self, name)
                if value is not None and not least <= value < float("inf"):
                    flag = name.replace("_", "-")
                    raise ConfigError(f"--{flag} must be at least {least:g}, not {value:g}.")

    @property
    def quiet_paths(self) -> frozenset[str]:
        """Paths that get no access-log line."""
        listed = self.disable_access_log_for_endpoints.split(",")
        return frozenset(path.strip() for path in listed if path.strip())

    def redacted(self, *, admin: bool) -> dict[str, object]:
        """The configuration as plain values, without its secrets; for others than administrators
        also without places on this machine and the seed, from which others' draws could be told.
        """
        from dataclasses import asdict

        values = asdict(self)
        for name in ("api_key", "admin_api_key"):
            values[name] = ["***"] * len(values[name])
        return values if admin else {k: v for k, v in values.items() if k not in _FOR_ADMINS}


def is_loopback(host: str) -> bool:
    """True where only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
