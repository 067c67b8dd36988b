"""`Surroundings`: a snapshot of functions and torch settings that a call of an attention function must not change."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from saccade.support.language import Message
from saccade.testing import oracle, tolerances

_OWNERS: tuple[ModuleType | type, ...] = (torch, torch.linalg, torch.testing, torch.Tensor, F, oracle, tolerances)


class _Setting(NamedTuple):
    read: Callable[[], Any]
    write: Callable[[Any], Any]


_SETTINGS = {
    "default dtype": _Setting(torch.get_default_dtype, torch.set_default_dtype),
    "gradient mode": _Setting(torch.is_grad_enabled, torch._C._set_grad_enabled),
    "number of threads": _Setting(torch.get_num_threads, torch.set_num_threads),
    "precision of float32 products": _Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
}


class Surroundings:
    """A snapshot of the functions and torch settings on which the tests of an attention function rely."""

    def __init__(self) -> None:
        self.functions = {owner: {name: x for name, x in vars(owner).items() if callable(x)} for owner in _OWNERS}
        self.settings = {name: setting.read() for name, setting in _SETTINGS.items()}

    def restore(self) -> tuple[str, ...]:
        """Restore the snapshot, and return a sentence for each function or setting that had changed."""
        found = []
        for name, known in self.settings.items():  # first, because setting a default dtype replaces torch.Storage
            if (now := _SETTINGS[name].read()) != known:
                found.append(Message("torch's {name} is {now}, not {known}", name=Message(name), now=now, known=known))
                _SETTINGS[name].write(known)
        for owner, names in self.functions.items():
            current = {name: vars(owner).get(name) for name in names}
            for name in [name for name, known in names.items() if _original(current[name]) is not _original(known)]:
                found.append(Message("{name} was replaced by another function", name=f"{owner.__name__}.{name}"))
                setattr(owner, name, names[name])
        return tuple(found)


def _original(function: Any) -> Any:
    """Return the function itself; for the wrapper that the compiler's import puts around `manual_seed`, the latter."""
    return _SEED if getattr(function, "__wrapped__", None) is _SEED else function


_SEED = torch.random.manual_seed
