"""Ways of running a model that ought to say the same, each asked for by one name whatever the model is called with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from saccade.auditing.float64 import said
from saccade.auditing.model_under_test import rows_of
from saccade.support.errors import kind, value_error

Side = Literal["left", "right"]
Beside = Literal["positions", "a cache", "a mask of ones", "a mask of four dimensions"]
Outputs = Callable[[Any], Tensor]


class Unanswered(Exception):  # noqa: N818  # no error: a model that has no such way is not wrong
    """A model cannot be run in this way; the message says why."""


class WrongArgument(ValueError):  # noqa: N818  # says whose it is
    """The user's own mistake; whatever else is raised while a model runs is the model's."""


class Runner:
    """Runs a model that is a function of token ids, ``model(ids)``; subclasses know more ways than one.

    Each way returns the rows of the real tokens, ``[batch, len, ...]``, or raises `Unanswered`.

    Args:
        model: the module that is run.
        outputs: makes rows of what it returns; the logits, the last hidden states or the tensor itself by default.
    """

    def __init__(self, model: nn.Module, outputs: Outputs | None = None):
        self.model, self._pick = model, outputs or rows_of

    @property
    def window(self) -> int | None:
        """The last tokens that some layer sees, itself included, where that is known."""
        return None

    @property
    def vocab_size(self) -> int | None:
        """How many tokens there are, where that is known."""
        return None

    def on(self, model: nn.Module) -> Self:
        """The same ways, of another model."""
        other = copy.copy(self)
        other.model = model
        return other

    def whole(self, ids: Tensor) -> Tensor:
        """All at once, ids ``[batch, len]``."""
        return self._rows(self.model(ids), ids)

    def shifted(self, ids: Tensor, by: int) -> Tensor:
        """All at once, with every position so much larger."""
        raise Unanswered("the model is not told positions")

    def padded(self, ids: Tensor, side: Side, pad: int) -> Tensor:
        """With so many rows of padding at one side, which are not returned."""
        raise Unanswered("the model is not told where padding is")

    def packed(self, ids: Tensor, lengths: Sequence[int], *, beside: Beside = "positions") -> Tensor:
        """Texts one behind another, ids ``[1, len]``, told apart by their positions.

        Beside these, a cache is filled, a mask of ones says that nothing is padding, one of four dimensions says which
        pairs are allowed.
        """
        raise Unanswered("the model is not told where texts end")

    def start(self) -> Any:
        """An empty cache, or whatever `more` begins with."""
        raise Unanswered("the model has no cache")

    def more(self, ids: Tensor, state: Any) -> tuple[Tensor, Any]:
        """The next tokens: their rows, and the cache with them."""
        raise Unanswered("the model has no cache")

    def forked(self, state: Any) -> Any:
        """An independent copy of a cache."""
        return copy.deepcopy(state)

    def rewindable(self, state: Any) -> Any:
        """The cache, told that some of the tokens to come may be taken out again."""
        return state

    def cropped(self, state: Any, tokens: int) -> Any:
        """The cache without the last tokens."""
        raise Unanswered("the model's cache is not cropped")

    def reordered(self, state: Any, rows: Tensor) -> Any:
        """The cache with these batch items, int64 ``[batch]``."""
        raise Unanswered("the model's cache is not reordered")

    def implemented(self, name: str) -> Self:
        """The same on a copy of the model that computes attention in another way."""
        raise Unanswered("the model has one implementation of attention")

    def ours(self, lengths: Sequence[int]) -> Self:
        """The same on a copy of the model that computes attention by our kernel, which knows where texts end."""
        raise Unanswered("its attention is not exchanged")

    def trained(self) -> Self:
        """The same on a copy of the model in training mode, with every dropout at 0."""
        other = copy.deepcopy(self.model).train()
        for part in other.modules():
            without_dropout(part)
        return self.on(other)

    def steps(self, ids: Tensor, split: Sequence[int]) -> Tensor:
        """In pieces that are cut at these places, through the cache."""
        state, rows = self.start(), []
        for piece in ids.tensor_split(list(split), dim=1):
            out, state = self.more(piece, state)
            rows.append(out)
        return torch.cat(rows, 1)

    def _rows(self, out: Any, ids: Tensor) -> Tensor:
        try:
            rows = self._pick(out)
        except Exception as error:
            raise _pick_error(ids, said(error)) from error
        if not isinstance(rows, Tensor):
            raise _pick_error(ids, kind(rows))
        if rows.shape[:2] != ids.shape or not rows.is_floating_point():
            raise _pick_error(ids, f"{rows.dtype} {list(rows.shape)}")
        return rows


class PlainRunner(Runner):
    """A module that is called with ids and nothing else: it is run whole, and in batches."""


def without_dropout(part: object) -> None:
    """Sets whatever part of a model, or its config, calls a probability of dropout to 0."""
    is_dropout = "drop" in type(part).__name__.lower()
    for name, value in list(vars(part).items()):
        if isinstance(value, float) and ("drop" in name or (is_dropout and name == "p")):
            setattr(part, name, 0.0)


def _pick_error(ids: Tensor, got: object) -> WrongArgument:
    shape = f"[{ids.shape[0]}, {ids.shape[1]}, ...]"
    return WrongArgument(str(value_error("outputs", f"return floats {shape} of what the model returns", got)))
