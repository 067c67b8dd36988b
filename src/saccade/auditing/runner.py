"""Runner: equivalent ways to run a model, each a method with the same name for every kind of model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from saccade.auditing.float64 import describe_error
from saccade.auditing.model_under_test import rows_of
from saccade.support.errors import kind, value_error

Side = Literal["left", "right"]
Beside = Literal["positions", "a cache", "a mask of ones", "a mask of four dimensions"]
Outputs = Callable[[Any], Tensor]


class Unanswered(Exception):  # noqa: N818  # no error: a model that cannot be run in this way is not wrong
    """A model cannot be run in this way; the message says why."""


class WrongArgument(ValueError):  # noqa: N818  # the name says that the argument is wrong
    """A mistake of the user; other exceptions while a model runs are the model's."""


class Runner:
    """The ways to run a model that is a function of token ids, ``model(ids)``; subclasses add more ways.

    Each way returns the rows of the tokens without padding, ``[batch, len, ...]``, or raises `Unanswered`.

    Args:
        model: the module that is run.
        outputs: makes rows of its result; the logits, the last hidden states or the tensor itself by default.
    """

    def __init__(self, model: nn.Module, outputs: Outputs | None = None):
        self.model, self._outputs = model, outputs or rows_of

    @property
    def window(self) -> int | None:
        """The number of last tokens that some layer sees, the query included; None if that is not known."""
        return None

    @property
    def vocab_size(self) -> int | None:
        """The size of the vocabulary; None if that is not known."""
        return None

    def on(self, model: nn.Module) -> Self:
        """Return the same runner for another model."""
        other = copy.copy(self)
        other.model = model
        return other

    def whole(self, ids: Tensor) -> Tensor:
        """Run all ids ``[batch, len]`` at once."""
        return self._rows(self.model(ids), ids)

    def shifted(self, ids: Tensor, by: int) -> Tensor:
        """Run all ids at once, with every position larger by ``by``."""
        raise Unanswered("the model takes no positions")

    def padded(self, ids: Tensor, side: Side, pad: int) -> Tensor:
        """Run with ``pad`` rows of padding at one side, which are not returned."""
        raise Unanswered("the model takes no padding mask")

    def packed(self, ids: Tensor, lengths: Sequence[int], *, beside: Beside = "positions") -> Tensor:
        """Run texts packed one after another, ids ``[1, len]``, distinguished by their positions.

        In addition to the positions, the model may fill a cache, get a mask of ones (nothing is padding), or a mask of
        four dimensions (the allowed pairs).
        """
        raise Unanswered("the model takes no lengths of texts")

    def start(self) -> Any:
        """Return an empty cache, or whatever `more` begins with."""
        raise Unanswered("the model has no cache")

    def more(self, ids: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Run the next tokens; return their rows and the cache."""
        raise Unanswered("the model has no cache")

    def forked(self, state: Any) -> Any:
        """Return an independent copy of a cache."""
        return copy.deepcopy(state)

    def rewindable(self, state: Any) -> Any:
        """Return the cache, prepared for a later `cropped`."""
        return state

    def cropped(self, state: Any, tokens: int) -> Any:
        """Return the cache without the last tokens."""
        raise Unanswered("the model's cache is not cropped")

    def reordered(self, state: Any, rows: Tensor) -> Any:
        """Return the cache with these batch items, int64 ``[batch]``."""
        raise Unanswered("the model's cache is not reordered")

    def implemented(self, name: str) -> Self:
        """Return the runner of a copy of the model with another attention implementation."""
        raise Unanswered("the model has one implementation of attention")

    def ours(self, lengths: Sequence[int]) -> Self:
        """Return the runner of a copy of the model on saccade's kernel, which gets the lengths of packed texts."""
        raise Unanswered("its attention cannot be replaced")

    def trained(self) -> Self:
        """Return the runner of a copy of the model in training mode, with every dropout at 0."""
        other = copy.deepcopy(self.model).train()
        for part in other.modules():
            without_dropout(part)
        return self.on(other)

    def steps(self, ids: Tensor, split: Sequence[int]) -> Tensor:
        """Run in pieces cut at these places, through the cache."""
        state, rows = self.start(), []
        for piece in ids.tensor_split(list(split), dim=1):
            out, state = self.more(piece, state)
            rows.append(out)
        return torch.cat(rows, 1)

    def _rows(self, out: Any, ids: Tensor) -> Tensor:
        try:
            rows = self._outputs(out)
        except Exception as error:
            raise _outputs_error(ids, describe_error(error)) from error
        if not isinstance(rows, Tensor):
            raise _outputs_error(ids, kind(rows))
        if rows.shape[:2] != ids.shape or not rows.is_floating_point():
            raise _outputs_error(ids, f"{rows.dtype} {list(rows.shape)}")
        return rows


class PlainRunner(Runner):
    """The runner of a module that takes ids alone: whole, and in batches."""


def without_dropout(part: object) -> None:
    """Set every dropout probability of a part of a model, or of its config, to 0."""
    is_dropout = "drop" in type(part).__name__.lower()
    for name, value in list(vars(part).items()):
        if isinstance(value, float) and ("drop" in name or (is_dropout and name == "p")):
            setattr(part, name, 0.0)


def _outputs_error(ids: Tensor, got: object) -> WrongArgument:
    shape = f"[{ids.shape[0]}, {ids.shape[1]}, ...]"
    return WrongArgument(str(value_error("outputs", f"return floats {shape} of what the model returns", got)))
