"""The policies that a configuration names: those of :mod:`turnstile.core`, or anybody's own.

A name is one that the core lists (``fair``, ``expected`` …), or ``module:Class`` for a policy that
stands outside of Turnstile; the module must be where Python finds it (installed, or on
``PYTHONPATH``). Torch-free: the engine process makes the policy, and the API process and the
simulator ask the same class what they must know to predict. ``docs/policies.md`` shows how to
write one.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, TypeVar

from turnstile.core.admission import ADMISSION_POLICIES, AdmissionPolicy
from turnstile.core.fairness import QUEUE_POLICIES, QueuePolicy
from turnstile.core.preemption import PREEMPTION_POLICIES, VictimPolicy, choose_victim
from turnstile.core.request import Sequence

P = TypeVar("P")
logger = logging.getLogger("turnstile.engine")


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
    return victim if name in PREEMPTION_POLICIES else _guarded(victim, name)


def _guarded(choose: VictimPolicy, name: str) -> VictimPolicy:
    """A choice that may be wrong: where it fails, or names who does not run, ours decides.

    Pages run out in the middle of many people's answers. A new engine would lose all of their
    work, and meet the same fault as soon as its pages run out.
    """

    def choose_or_let_us(
        running: Seq[Sequence], queue: QueuePolicy, pin_after: int
    ) -> Sequence | None:
        try:
            victim = choose(tuple(running), queue, pin_after)
            if victim is None or any(victim is sequence for sequence in running):
                return victim
            logger.error("--preemption: %s named %r, which does not run", name, victim)
        except Exception:
            # It is anybody's code, so anything may go wrong in it.
            logger.exception("--preemption: %s failed", name)
        return choose_victim(running, queue, pin_after)

    return choose_or_let_us


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
