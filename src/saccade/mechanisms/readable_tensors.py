"""Checks whether the values of tensors can be read, or only their shapes (fake, traced or vmapped tensors)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from saccade.support.numerics import is_finite
from saccade.support.torch_modes import is_plain, is_recorded

_is_clean = ContextVar("saccade_taken_as_clean", default=False)


@contextmanager
def assuming_finite() -> Iterator[None]:
    """Within a ``with`` block, assume that unreadable tensors are finite and that unreadable bool marks are False."""
    token = _is_clean.set(True)
    try:
        yield
    finally:
        _is_clean.reset(token)


def is_readable(*tensors: Tensor) -> bool:
    """Return whether Python code can read the values of tensors and branch on them.

    They cannot be read under a tracing compiler or ``make_fx``, inside a transform of ``torch.func``, or with fake or
    meta tensors. Code that branches on values needs an equivalent path without branches for these cases.
    """
    return not is_recorded() and all(is_plain(x) and x.device.type != "meta" for x in tensors)


def is_surely_finite(x: Tensor) -> bool:
    """Return whether a tensor is known to be finite. An unreadable tensor counts as finite only in a dry run."""
    return is_finite(x) if is_readable(x) else is_dry_run()


def nonfinite_tokens(x: Tensor) -> Tensor | None:
    """Return which tokens contain NaN or inf, bool ``[batch, heads, len]``, or None if all are known to be finite."""
    return None if is_surely_finite(x) else ~torch.isfinite(x.detach()).all(-1)


def marks_or_none(marks: Tensor) -> Tensor | None:
    """Return bool ``marks``, or None if all are False. Unreadable marks are returned unchanged, except in a dry run."""
    return None if (not bool(marks.any()) if is_readable(marks) else is_dry_run()) else marks


def is_dry_run() -> bool:
    """Return whether a dry run is forecasting costs: it uses no results, and treats unreadable tensors as finite."""
    # torch.compile cannot trace a context variable, but dry runs are never compiled.
    return not torch.compiler.is_dynamo_compiling() and _is_clean.get()
