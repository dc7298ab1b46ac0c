"""The policies that a configuration names: those of :mod:`turnstile.core`, or anybody's own.

A name is one that the core lists (``fair``, ``expected`` …), or ``module:Class`` for a policy that
stands outside of Turnstile; the module must be where Python finds it (installed, or on
``PYTHONPATH``). Torch-free: the engine process makes the policy, and the API process and the
simulator ask the same class what they must know to predict. ``docs/policies.md`` shows how to
write one.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, TypeVar

from turnstile.core.admission import ADMISSION_POLICIES, AdmissionPolicy
from turnstile.core.fairness import QUEUE_POLICIES, QueuePolicy
from turnstile.core.preemption import PREEMPTION_POLICIES, VictimPolicy

P = TypeVar("P")


class PolicyError(ValueError):
    """There is no such policy, or it is not what it should be; the message says which and why."""


def admission_policy(name: str) -> type[AdmissionPolicy]:
    """Who may start. Raises :class:`PolicyError`."""
    found = _find("admission", name, ADMISSION_POLICIES)
    return _subclass(found, "admission", AdmissionPolicy)  # type: ignore[type-abstract]


def queue_policy(name: str) -> type[QueuePolicy]:
    """Who is next. Raises :class:`PolicyError`."""
    found = _find("scheduling-policy", name, QUEUE_POLICIES)
    return _subclass(found, "scheduling-policy", QueuePolicy)  # type: ignore[type-abstract]


def preemption_policy(name: str) -> VictimPolicy:
    """Who must go when the pages run out. Raises :class:`PolicyError`."""
    found = _find("preemption", name, PREEMPTION_POLICIES)
    if not callable(found):
        raise PolicyError(f"--preemption: {name} is not a function that chooses a victim.")
    victim: VictimPolicy = found
    return victim


def _find(flag: str, name: str, listed: Mapping[str, Any]) -> Any:
    """What the core lists under ``name``, else what a module has under it."""
    if name in listed:
        return listed[name]
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise PolicyError(
            f"--{flag}: there is no policy {name!r}; there are {', '.join(listed)}, and your own "
            "as module:name."
        )
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:
        # Importing runs the module, so anything may be wrong with it.
        raise PolicyError(
            f"--{flag}: {name} cannot be loaded ({type(error).__name__}: {error}). The module must "
            "be installed, or its folder named in PYTHONPATH."
        ) from error


def _subclass(found: Any, flag: str, base: type[P]) -> type[P]:
    """``found``, if it is a policy of this kind and can be made without arguments."""
    if not (isinstance(found, type) and issubclass(found, base)):
        raise PolicyError(f"--{flag}: {found!r} is not a subclass of {base.__name__}.")
    try:
        found()
    except Exception as error:
        raise PolicyError(f"--{flag}: {found.__name__}() cannot be made: {error}.") from error
    return found
