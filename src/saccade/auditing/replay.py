"""Rerun modules of a model in place, with the arguments of a real call but different hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from saccade.auditing.model_under_test import ModelUnderTest
from saccade.auditing.multi_process import with_summed_gradient
from saccade.auditing.token_axes import tensors_of

# These arguments are set to None, so that a rerun does not find the keys that the first run stored.
_CACHES = ("past_key_values", "past_key_value", "cache", "cache_params")
_HIDDEN = ("hidden_states", "x", "query", "inputs")  # names of keyword arguments that hold the rows that modules mix


@contextmanager
def replaying(
    subject: ModelUnderTest,
    modules: Mapping[str, nn.Module],
    visit: Callable[[str, Callable[[Tensor], Tensor], Tensor, Tensor], None],
) -> Iterator[None]:
    """Call ``visit`` after each call of a module within the block, with a function that reruns the module.

    Modules that do not take rows are skipped. Inputs and outputs are ``[batch, length, ...]``, with one row per token;
    rows of tokens that the module does not receive are 0.
    """
    running = False

    def hook(name: str) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            nonlocal running
            own, found = subject.part_of(name), tensors_of(out)
            row_arguments = {} if running else _row_arguments(subject, name, args, kwargs)
            if not row_arguments or not found or found[0].dim() < 3:  # a tensor of two dimensions may hold pooled rows
                return
            rows = subject.as_rows(name, found[0])
            if rows is None:
                return
            uncached = {name: None if name in _CACHES else value for name, value in kwargs.items()}

            def rerun(other: Tensor) -> Tensor:
                other = with_summed_gradient(other, subject.group)
                # Keep identical arguments identical, because modules test whether the query is the key.
                parts = {one.key: one.with_rows(other) for one in row_arguments.values()}
                changed = {slot: parts[one.key] for slot, one in row_arguments.items()}
                positional = [changed.get(slot, one) for slot, one in enumerate(args)]
                named = {name: changed.get(name, one) for name, one in uncached.items()}
                result = tensors_of(module(*positional, **named))[0]
                return _scatter_rows([(result.transpose(0, 1) if rows[1] else result, own)], subject.shape[1])

            running = True
            try:
                visit(
                    name,
                    rerun,
                    _scatter_rows([(one.rows, one.part) for one in row_arguments.values()], subject.shape[1]),
                    _scatter_rows([(rows[0], own)], subject.shape[1]),
                )
            finally:
                running = False

        return note

    handles = [module.register_forward_hook(hook(name), with_kwargs=True) for name, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Argument(NamedTuple):
    """A module's argument that holds rows of tokens.

    Args:
        rows: ``[batch, length, ...]``.
        part: the range of tokens that the rows belong to.
        is_transposed: whether the module takes the rows as ``[length, batch, ...]``.
    """

    rows: Tensor
    part: slice
    is_transposed: bool = False

    @property
    def key(self) -> tuple[int, int, bool]:
        """A dictionary key for the argument, equal for arguments that hold the same rows."""
        return self.part.start, self.part.stop, self.is_transposed

    def with_rows(self, other: Tensor) -> Tensor:
        """Select the rows of this argument's tokens from the rows of all tokens, in the argument's layout."""
        own = other[:, self.part]
        return (own.transpose(0, 1) if self.is_transposed else own).contiguous()


def _row_arguments(
    subject: ModelUnderTest, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[int | str, _Argument]:
    """Return the arguments with one row per token, either of the module's own text or of one that it attends to.

    The first such argument holds the module's rows, as do all arguments equal to it, as in ``attention(x, x, x)``.
    """
    own, found = subject.part_of(name), dict[int | str, _Argument]()
    first: Tensor | None = None
    given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for slot, one in given:
        if not isinstance(one, Tensor) or not one.is_floating_point() or one.dim() < 3:
            continue
        if (other := subject.encoder_span(one)) is not None and other != own:
            found[slot] = _Argument(one, other)
        elif first is None and (isinstance(slot, int) or slot in _HIDDEN):
            if (rows := subject.as_rows(name, one)) is not None:
                found[slot], first, known = _Argument(rows[0], own, rows[1]), one, slot
        elif first is not None and _is_same(one, first):
            found[slot] = found[known]
    return {} if first is None else found


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))


def _scatter_rows(rows: Iterable[tuple[Tensor, slice]], length: int) -> Tensor:
    """Copy rows of several token ranges into one tensor with a row for every token; missing rows are 0."""
    rows = list(rows)
    first, part = rows[0]
    if len(rows) == 1 and part == slice(0, length):
        return first
    out = first.new_zeros(len(first), length, *first.shape[2:])
    for one, part in rows:
        out[:, part] = one
    return out
