"""The class `Runner`: run models of any kind in equivalent ways, through one interface."""

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


class Unanswered(Exception):  # noqa: N818  # not an error: a model that cannot be run in this way is not wrong
    """An exception raised by a runner if the model cannot be run in the requested way; the message says why."""


class WrongArgument(ValueError):  # noqa: N818  # the name says that the argument is wrong
    """An exception raised by a runner for an invalid user argument. Other exceptions come from the model."""


class Runner:
    """A model that maps token ids to rows, ``model(ids)``, with methods that run it in equivalent ways.

    Subclasses support more of these methods. Each method returns the rows of all tokens except padding,
    ``[batch, len, ...]``, or raises `Unanswered`.

    Args:
        model: the module to run.
        outputs: a function that extracts rows from the module's result; by default the logits, the last hidden states
            or the tensor itself.
    """

    def __init__(self, model: nn.Module, outputs: Outputs | None = None):
        self.model, self.outputs = model, outputs or rows_of

    @property
    def window(self) -> int | None:
        """The size of the model's attention window, including the query itself; None if unknown."""
        return None

    @property
    def vocab_size(self) -> int | None:
        """The size of the model's vocabulary; None if unknown."""
        return None

    def on(self, model: nn.Module) -> Self:
        """Return a runner of the same kind, with the same options, for another model."""
        other = copy.copy(self)
        other.model = model
        return other

    def whole(self, ids: Tensor) -> Tensor:
        """Run the model on all ids ``[batch, len]`` at once."""
        return self._rows(self.model(ids), ids)

    def shifted(self, ids: Tensor, by: int) -> Tensor:
        """Run the model on all ids at once, with every position increased by ``by``."""
        raise Unanswered("the model takes no positions")

    def padded(self, ids: Tensor, side: Side, pad: int) -> Tensor:
        """Run the model with ``pad`` tokens of padding on one side, and return only the rows of real tokens."""
        raise Unanswered("the model takes no padding mask")

    def packed(self, ids: Tensor, lengths: Sequence[int], *, beside: Beside = "positions") -> Tensor:
        """Run the model on packed texts, ids ``[1, len]``, with positions that restart at the beginning of each text.

        ``beside`` names an input that the model receives in addition to the positions: a cache to fill, a mask of ones
        (no padding), or an additive mask with four dimensions (0 for allowed pairs). "positions" adds nothing.
        """
        raise Unanswered("the model does not take text lengths")

    def packed_inputs(self, ids: Tensor, lengths: Sequence[int]) -> tuple[dict[str, Any], str]:
        """Return the model's inputs for packed texts, and the names of the arguments that separate the texts.

        The inputs include every packing-related argument that the model accepts.
        """
        raise Unanswered("the model does not take text lengths; give packed inputs and a rule with documents")

    def start(self) -> Any:
        """Return the initial state for `more`, such as an empty cache."""
        raise Unanswered("the model has no cache")

    def more(self, ids: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Run the model on the next tokens, and return the rows of these tokens and the updated cache."""
        raise Unanswered("the model has no cache")

    def forked(self, state: Any) -> Any:
        """Return an independent copy of a cache."""
        return copy.deepcopy(state)

    def rewindable(self, state: Any) -> Any:
        """Prepare a cache so that `cropped` can later remove its last tokens, and return it."""
        return state

    def cropped(self, state: Any, tokens: int) -> Any:
        """Return a cache without its last ``tokens`` tokens."""
        raise Unanswered("the model's cache cannot be cropped")

    def reordered(self, state: Any, rows: Tensor) -> Any:
        """Return a cache with the batch items ``rows``, int64 ``[batch]``, in this order."""
        raise Unanswered("the model's cache cannot be reordered")

    def implemented(self, name: str) -> Self:
        """Return a runner for a copy of the model that uses the attention implementation called ``name``."""
        raise Unanswered("the model has only one attention implementation")

    def ours(self, lengths: Sequence[int]) -> Self:
        """Return a runner for a copy of the model that uses saccade's kernel with a mask for texts of these lengths."""
        raise Unanswered("its attention cannot be replaced")

    def trained(self) -> Self:
        """Return a runner for a copy of the model in training mode, with all dropout probabilities set to 0."""
        other = copy.deepcopy(self.model).train()
        for part in other.modules():
            without_dropout(part)
        return self.on(other)

    def checkpointed(self) -> Self:
        """Return a runner for a copy of the model that recomputes activations in the backward pass."""
        raise Unanswered("the model has no gradient_checkpointing_enable")

    def compiled(self) -> Self:
        """Return a runner for a compiled copy of the model."""
        other = copy.deepcopy(self.model)
        return self.on(torch.compile(other, backend="aot_eager"))  # type: ignore[arg-type]  # called like a module

    def filling_cache(self, ids: Tensor) -> Tensor:
        """Run the model on all ids at once while it fills a cache."""
        raise Unanswered("the model has no cache")

    def stretched(self, ids: Tensor, by: int, axis: int | None = None) -> Tensor:
        """Run the model with positions multiplied by ``by`` on one position axis, or on all if ``axis`` is None."""
        raise Unanswered("the model takes no positions")

    def on_axes(self, ids: Tensor) -> Tensor:
        """Run a model with several position axes, using the positions of plain text on every axis."""
        raise Unanswered("its positions have a single axis")

    def steps(self, ids: Tensor, split: Sequence[int]) -> Tensor:
        """Run the model with a cache on consecutive chunks of the ids, cut at the positions ``split``."""
        state, rows = self.start(), []
        for piece in ids.tensor_split(list(split), dim=1):
            out, state = self.more(piece, state)
            rows.append(out)
        return torch.cat(rows, 1)

    def _rows(self, out: Any, ids: Tensor) -> Tensor:
        try:
            rows = self.outputs(out)
        except Exception as error:
            raise _outputs_error(ids, describe_error(error)) from error
        if not isinstance(rows, Tensor):
            raise _outputs_error(ids, kind(rows))
        if rows.shape[:2] != ids.shape or not rows.is_floating_point():
            raise _outputs_error(ids, f"{rows.dtype} {list(rows.shape)}")
        return rows


class PlainRunner(Runner):
    """A runner for a module that takes only ids, without cache, mask or positions."""


def without_dropout(part: object) -> None:
    """Set every dropout probability of a module or configuration to 0."""
    is_dropout = "drop" in type(part).__name__.lower()
    for name, value in list(vars(part).items()):
        if isinstance(value, float) and ("drop" in name or (is_dropout and name == "p")):
            setattr(part, name, 0.0)


def _outputs_error(ids: Tensor, got: object) -> WrongArgument:
    shape = f"[{ids.shape[0]}, {ids.shape[1]}, ...]"
    return WrongArgument(str(value_error("outputs", f"return floats {shape} from the model's result", got)))
