"""parallelize(): run complete saccade and transformers models across ranks."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from saccade.distributed import transformers_ranks
from saccade.distributed.context_parallel import ContextParallel
from saccade.distributed.parallel_mechanism import ParallelMechanism
from saccade.integrations.replace_attention import is_pretrained
from saccade.masks import Mask
from saccade.nn import AttentionPool, DecoderLayer, LatentAttention
from saccade.nn.base_layer import AttentionLayer
from saccade.nn.table_attention import TableAttention
from saccade.support.errors import unsupported
from saccade.support.validation import check_type

M = TypeVar("M", bound=nn.Module)
_ALL_ROWS = (nn.MultiheadAttention, nn.RNNBase, AttentionPool, TableAttention)


def parallelize(model: M, cp: ContextParallel, *, mask: Mask | None = None) -> M:
    """Make each rank run a model on its part of the sequence, with the same results as for the full sequence.

    The model's attention layers get mechanisms that run across ranks; parameters, their names and token-wise layers
    do not change. Call the model with the local rows and their positions:
    ``model(cp.shard_sequence(tokens), positions=cp.positions(n))``. Masks passed to a call describe the full sequence.
    Shift labels before sharding them; the loss is the sum over all ranks divided by the count over all ranks.

    A transformers model is called as before, with the local rows: ``model(cp.shard_sequence(input_ids))``. By default,
    ``position_ids`` are the positions of the local rows; they also separate packed documents across all ranks.

    Args:
        model: a saccade model, or a transformers model that calls the attention interface; changed in place. Apply
            FSDP, DDP or tensor parallelism afterwards.
        cp: the `ContextParallel` of the ranks.
        mask: for a transformers model, a pattern of the full sequence that is combined with the model's mask.

    Returns:
        The model.

    Raises:
        UnsupportedError: parts of the model mix tokens and cannot do so across ranks. The error lists all of them, and
            nothing is changed.

    Example:
        >>> from saccade.distributed import ContextParallel, parallelize
        >>> cp = ContextParallel(layout="zigzag")  # doctest: +SKIP
        >>> parallelize(decoder, cp)  # doctest: +SKIP
        >>> logits = decoder(cp.shard_sequence(tokens), positions=cp.positions(tokens.shape[1]))  # doctest: +SKIP
    """
    check_type("model", model, nn.Module, "be a module")
    check_type("cp", cp, ContextParallel, "be a ContextParallel")
    check_type("mask", mask, (Mask, type(None)), "be a saccade mask or None")
    if is_pretrained(model):
        transformers_ranks.parallelize(model, cp, mask)
        return model
    layers = [(name, part) for name, part in model.named_modules() if isinstance(part, AttentionLayer)]
    reasons = [
        f"{name or 'the model'} is a {why}" for name, part in model.named_modules() if (why := _kind_that_mixes(part))
    ]
    if mask is not None:
        reasons.append("mask= is only for transformers models; saccade's models take it in the call")
    if not layers:
        reasons.append("it has no attention layer of saccade.nn")
    if reasons:
        raise unsupported(
            type(model).__name__, reasons, hint="cp.attention(...) and cp(mechanism) are the building blocks"
        )
    mechanisms = [cp(layer.mechanism) for _, layer in layers]  # raises before the first layer is changed
    for (_, layer), mechanism in zip(layers, mechanisms, strict=True):
        layer.mechanism = mechanism
    return model


def _kind_that_mixes(part: nn.Module) -> str:
    """Return a description of a module that cannot run on part of the sequence, or "" if the module can."""
    if isinstance(part, AttentionLayer) and isinstance(part.mechanism, ParallelMechanism):
        return f"{type(part).__name__} that already runs over ranks"
    if isinstance(part, LatentAttention) and (part.indexer is not None or part.source is not None):
        return "LatentAttention that selects keys by their columns, which differ between ranks"
    if isinstance(part, _ALL_ROWS):
        return f"{type(part).__name__}, which mixes tokens of all rows"
    if isinstance(part, DecoderLayer) and part.cross_attention is not None:
        return "DecoderLayer with cross-attention, but only self-attention runs over ranks"
    return transformers_ranks.why_it_mixes(part)
