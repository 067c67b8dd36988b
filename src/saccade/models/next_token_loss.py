"""The next-token loss: the targets of a batch, and their mean cross-entropy without storing all logits at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from saccade.masks import And, BlockDiffusion, Documents, Mask, Padding
from saccade.models.linear_cross_entropy import LinearCrossEntropy
from saccade.positions.token_positions import GivenPositions, Positions
from saccade.support.autograd_functions import is_eager_training
from saccade.support.errors import type_error, value_error
from saccade.support.torch_modes import has_values, is_tracing, is_transformed
from saccade.tasks import IGNORED

_LOGITS = 1 << 22  # logits in one chunk: 16 MiB in float32, which fit into a processor's cache


def next_tokens(tokens: Tensor, mask: object = None, positions: GivenPositions = None) -> Tensor:
    """Return the token that follows each token in its text, int64 ``[batch, len]``; -100 if none follows.

    The last token of a text or packed document has no target. Padding has no target and is never a target.

    Args:
        tokens: int ``[batch, len]``.
        mask: the mask of the batch. `Documents` and `Padding` in it determine where texts end.
        positions: positions of the tokens. A text continues as long as they increase by 1; -1 marks padding.

    Raises:
        TypeError, ValueError: the mask depends on the batch, or combines two texts, but does not show where texts end.
    """
    batch, length = tokens.shape
    checked = Positions.of(range(length) if positions is None else positions, length=length, batch=batch)
    position = checked.on(tokens.device)
    is_token, counts = position >= 0, [position]
    for boundary in _text_boundaries(mask):
        if isinstance(boundary, Documents):
            counts.append(boundary.places(position))
        else:
            start, stop = boundary.table.to(tokens.device)[..., None]
            is_token = is_token & (position >= start) & (position < stop)
    follows = is_token[:, 1:] & is_token[:, :-1]
    for count in counts:
        follows = follows & (count[:, :-1] >= 0) & (count[:, 1:] == count[:, :-1] + 1)
    return F.pad(tokens[:, 1:].long().masked_fill(~follows, IGNORED), (0, 1), value=IGNORED)


def _text_boundaries(mask: object) -> list[Documents | Padding]:
    """Return the `Documents` and `Padding` in a mask. Raise an error if it depends on the batch in any other way."""
    hint = "pass targets=, with the next token of each token, or -100"
    if mask is None:
        return []
    if not isinstance(mask, Mask):
        raise type_error("mask", "be a Mask that separates texts", type(mask).__name__, hint=hint)
    boundaries: list[Documents | Padding] = []
    for part in mask.parts if isinstance(mask, And) else (mask,):
        if isinstance(part, Documents | Padding):
            boundaries.append(part)
        elif part.is_fact_of_batch or isinstance(part, BlockDiffusion):  # the halves of BlockDiffusion are two texts
            raise value_error("mask", "separate texts, as Documents and Padding do", repr(part), hint=hint)
    return boundaries


def check_targets(targets: object, tokens: Tensor, vocab_size: int) -> None:
    """Raise an error unless targets are int64 with the tokens' shape, each from 0 to ``vocab_size - 1`` or -100.

    Values are checked on the CPU only; on other devices, torch itself raises an error for wrong values.
    """
    if not isinstance(targets, Tensor) or targets.dtype != torch.int64:
        got = str(getattr(targets, "dtype", type(targets).__name__)).removeprefix("torch.")
        raise type_error("targets", "be an int64 tensor", got)
    if targets.shape != tokens.shape:
        raise value_error("targets", f"have shape {list(tokens.shape)}, like tokens", list(targets.shape))
    if targets.device.type != "cpu" or not has_values(targets) or is_tracing() or not targets.numel():
        return
    wrong = ((targets < 0) & (targets != IGNORED)) | (targets >= vocab_size)
    if bool(wrong.any()):
        rule = f"be from 0 to {vocab_size - 1}, or {IGNORED} if a token has no target"
        raise value_error("targets", rule, int(targets[wrong][0]))


def mean_cross_entropy(
    logits: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    chunk_size: int | None,
    vocab_size: int,
    weight: Tensor | None = None,
) -> Tensor:
    """Return the mean cross-entropy of targets, computed chunk by chunk, as a float32 or float64 scalar.

    Args:
        logits: function that maps ``[n, embed_dim]`` to ``[n, vocab_size]``.
        hidden: its inputs, ``[batch, len, embed_dim]``.
        targets: int64 ``[batch, len]``; tokens with target -100 do not count.
        chunk_size: number of tokens whose logits are computed at a time; by default, about four million logits.
        weight: ``[vocab_size, embed_dim]`` if logits are only a product with it.

    Cost: with several chunks and gradients, logits are computed twice if there is no ``weight``, or on a GPU, in half
    precision, under autocast or a compiler; under torch.func, all of them are stored.
    """
    rows = hidden.flatten(0, -2).split(size := chunk_size or max(64, _LOGITS // vocab_size))
    wanted = targets.flatten().split(size)

    def total(x: Tensor, wanted: Tensor) -> Tensor:
        scores = logits(x)
        scores = scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores
        return F.cross_entropy(scores, wanted, ignore_index=IGNORED, reduction="sum")

    count = (targets != IGNORED).sum()
    if len(rows) > 1 and weight is not None and is_eager_training(hidden, weight):
        whole: Tensor = LinearCrossEntropy.apply(hidden.flatten(0, -2), weight, targets.flatten(), size)
        return whole / count
    # Checkpointing saves nothing without gradients or with a single chunk, and torch.func does not support it.
    needs_no_checkpoint = len(rows) == 1 or not torch.is_grad_enabled() or is_transformed()
    totals = [
        total(*pair) if needs_no_checkpoint else checkpoint(total, *pair, use_reentrant=False, preserve_rng_state=False)
        for pair in zip(rows, wanted, strict=True)
    ]
    return torch.stack(totals).sum() / count
