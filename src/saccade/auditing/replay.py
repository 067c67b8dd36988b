"""Rerun modules of a model in place, with the arguments of a real call but different hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from saccade.auditing.model_under_test import ModelUnderTest
from saccade.auditing.multi_process import shared
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
    """Within the block, call ``visit`` after each call of a module, with a function that reruns the module.

    Modules that do not take rows are skipped. Inputs and outputs are ``[batch, length, ...]``, with one row per token;
    rows of tokens that the module does not receive are 0.
    """
    running = False

    def hook(name: str) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            nonlocal running
            own, found = subject.part_of(name), tensors_of(out)
            places = {} if running else _hidden(subject, name, args, kwargs)
            if not places or not found or found[0].dim() < 3:  # a tensor of two dimensions may hold pooled rows
                return
            rows = subject.as_rows(name, found[0])
            if rows is None:
                return
            uncached = {name: None if name in _CACHES else value for name, value in kwargs.items()}

            def again(other: Tensor) -> Tensor:
                other = shared(other, subject.group)
                # Keep identical arguments identical, because modules test whether the query is the key.
                parts = {one.key: one.with_rows(other) for one in places.values()}
                changed = {place: parts[one.key] for place, one in places.items()}
                positional = [changed.get(place, one) for place, one in enumerate(args)]
                named = {name: changed.get(name, one) for name, one in uncached.items()}
                result = tensors_of(module(*positional, **named))[0]
                return _spread([(result.transpose(0, 1) if rows[1] else result, own)], subject.shape[1])

            running = True
            try:
                visit(
                    name,
                    again,
                    _spread([(one.rows, one.part) for one in places.values()], subject.shape[1]),
                    _spread([(rows[0], own)], subject.shape[1]),
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
        is_turned: whether the module takes the rows as ``[length, batch, ...]``.
    """

    rows: Tensor
    part: slice
    is_turned: bool = False

    @property
    def key(self) -> tuple[int, int, bool]:
        """A dictionary key for the argument, equal for arguments that hold the same rows."""
        return self.part.start, self.part.stop, self.is_turned

    def with_rows(self, other: Tensor) -> Tensor:
        """Select the rows of this argument's tokens from the rows of all tokens, in the argument's layout."""
        own = other[:, self.part]
        return (own.transpose(0, 1) if self.is_turned else own).contiguous()


def _hidden(
    subject: ModelUnderTest, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[int | str, _Argument]:
    """Return the arguments of a module that hold rows of its text, or rows of another text that it attends to.

    The first such argument holds the module's rows, as do all arguments equal to it, as in ``attention(x, x, x)``.
    """
    own, found = subject.part_of(name), dict[int | str, _Argument]()
    first: Tensor | None = None
    given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for place, one in given:
        if not isinstance(one, Tensor) or not one.is_floating_point() or one.dim() < 3:
            continue
        if (other := subject.read_from(one)) is not None and other != own:
            found[place] = _Argument(one, other)
        elif first is None and (isinstance(place, int) or place in _HIDDEN):
            if (rows := subject.as_rows(name, one)) is not None:
                found[place], first, known = _Argument(rows[0], own, rows[1]), one, place
        elif first is not None and _is_same(one, first):
            found[place] = found[known]
    return {} if first is None else found


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other))


def _spread(rows: Iterable[tuple[Tensor, slice]], length: int) -> Tensor:
    """Copy rows of several token ranges into one tensor with a row for every token; missing rows are 0."""
    rows = list(rows)
    first, part = rows[0]
    if len(rows) == 1 and part == slice(0, length):
        return first
    out = first.new_zeros(len(first), length, *first.shape[2:])
    for one, part in rows:
        out[:, part] = one
    return out
