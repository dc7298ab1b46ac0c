"""Where settings come from: the command line, the environment, a file, the default, in this order.

Whatever the source, names may be written with ``_`` or ``-``, sizes as ``1k``, ``32K`` or
``25.6k``, and other servers' names for the same thing work too.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cyclopts import App, ArgumentCollection
from cyclopts.config import Dict, Env
from cyclopts.exceptions import UnknownOptionError


class SettingsError(ValueError):
    """The settings file cannot be used; the message says why."""


ALIASES = {
    "block-size": "page-size",
    "quantization": "dtype",
    "device-memory-utilization": "gpu-memory-utilization",
    "alias": "served-model-name",
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG])(i?[bB]?)")
_POWERS = {"k": 1, "m": 2, "g": 3}

Config = Callable[[App, tuple[str, ...], ArgumentCollection], Any]


def parse_size(text: str) -> str:
    """``25.6k`` as digits: 25600. Lower-case suffixes count by 1000, upper-case ones by 1024.

    What is no size comes back as it is.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return text
    number, suffix, _ = match.groups()
    base = 1024 if suffix.isupper() else 1000
    value = float(number) * base ** _POWERS[suffix.lower()]
    return str(round(value)) if abs(value - round(value)) < 1e-6 else text


def sizes(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Let every integer be written as a size, wherever it comes from."""
    for argument in arguments:
        if _takes_integer(argument.hint):
            argument.tokens[:] = [
                token.evolve(value=parse_size(token.value)) for token in argument.tokens
            ]


def _takes_integer(hint: Any) -> bool:
    if hint is int:
        return True
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return int in typing.get_args(hint)
    return False


def normalize(tokens: Sequence[str]) -> list[str]:
    """Flags under the names we know them by: ``--block_size=8`` is ``--page-size=8``."""
    result: list[str] = []
    for place, token in enumerate(tokens):
        if token == "--":
            return [*result, *tokens[place:]]
        if token.startswith("--"):
            name, equals, value = token[2:].partition("=")
            token = f"--{_rename(name)}{equals}{value}"
        result.append(token)
    return result


def _rename(name: str) -> str:
    plain = name.replace("_", "-")
    return ALIASES.get(plain, plain)


def take_config(tokens: Sequence[str], command: str) -> tuple[list[str], Path | None]:
    """Take ``--config FILE`` out of the flags; the environment may name one too.

    It has to be known before the other flags are parsed, since it fills in what they leave out.
    """
    rest: list[str] = []
    path: str | None = None
    waiting = iter(tokens)
    for token in waiting:
        if token == "--config":
            path = next(waiting, None)
            if path is None:
                raise SettingsError("--config needs a file.")
        elif token.startswith("--config="):
            path = token.partition("=")[2]
        else:
            rest.append(token)
    path = path or os.environ.get(f"TURNSTILE_{command.upper()}_CONFIG")
    return rest, Path(path).expanduser() if path else None


def read_file(path: Path, command: str) -> dict[str, Any]:
    """The settings in a TOML or YAML file: at its top level, or under the command's name.

    Raises :class:`SettingsError` with the line where the file is broken.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SettingsError(f"Cannot read the settings in {path}: {reason}.") from None
    data = _parse_yaml(text, path) if path.suffix in (".yaml", ".yml") else _parse_toml(text, path)
    if not isinstance(data, Mapping):
        raise SettingsError(f"{path} must hold names and values.")
    section = data.get(command, data)
    if not isinstance(section, Mapping):
        raise SettingsError(f"{command} in {path} must hold names and values.")
    return {_rename(str(key)): value for key, value in section.items()}


def _parse_toml(text: str, path: Path) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path} is not valid TOML: {error}.") from None


def _parse_yaml(text: str, path: Path) -> Any:
    try:
        import yaml  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise SettingsError(
            f"Reading {path} needs PyYAML (pip install pyyaml); TOML works without it."
        ) from None
    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise SettingsError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from None


def warn_of_variables(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Name the variables that look like settings of this command, and are none, on stderr.

    A warning only: whatever starts a process may put variables of its own into its environment.
    """
    prefix = "_".join(["TURNSTILE", *commands, ""]).upper().replace("-", "_")
    known = {name.replace("-", "_").upper() for name in _names(arguments)}
    for name in sorted(os.environ):
        plain = name.removeprefix(prefix)
        if not name.startswith(prefix) or plain in known:
            continue
        meant = _nearest(plain.lower().replace("_", "-"), arguments)
        hint = f" Did you mean {prefix}{meant.replace('-', '_').upper()}?" if meant else ""
        print(f"turnstile: {name} is no setting and is ignored.{hint}", file=sys.stderr)


def explain(error: UnknownOptionError) -> str | None:
    """The sentence on a name in a settings file that is unknown; None for errors elsewhere."""
    source = error.token.source
    if source in ("cli", "env"):
        return None
    name = (error.token.keyword or "").strip("[]")
    meant = _nearest(name, error.argument_collection)
    hint = f" Did you mean {meant}?" if meant else ""
    return f"There is no setting {name} ({source}).{hint}"


def _names(arguments: ArgumentCollection) -> set[str]:
    return {name.lstrip("-") for a in arguments for name in a.names if name.startswith("--")}


def _nearest(name: str, arguments: ArgumentCollection) -> str | None:
    if _rename(name) != name:
        return _rename(name)
    return next(iter(difflib.get_close_matches(name, sorted(_names(arguments)), 1)), None)


def sources(path: Path | None, command: str) -> list[Config]:
    """What fills in the flags that were not given, first come first served."""
    chain: list[Any] = [warn_of_variables, Env("TURNSTILE_", command=True)]
    if path is not None:
        chain.append(Dict(read_file(path, command), source=str(path), use_commands_as_keys=False))
    return [*chain, sizes]
