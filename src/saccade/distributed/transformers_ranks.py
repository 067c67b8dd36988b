"""Run transformers models across ranks, with an attention function for local rows and masks of the full sequence."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.pooling import _AdaptiveAvgPoolNd, _AdaptiveMaxPoolNd, _AvgPoolNd, _MaxPoolNd

from saccade.distributed.collectives import check_agreement
from saccade.integrations.attention_arguments import check_no_weights
from saccade.integrations.lazy_mask import LazyMask, Placed
from saccade.integrations.mask_functions import as_rule, with_padding
from saccade.integrations.packed_patterns import with_pattern
from saccade.integrations.traced_functions import MaskFunction
from saccade.integrations.transformers import registered
from saccade.integrations.transformers_call import AttentionCall, uses_attention_interface
from saccade.masks import Documents, Mask
from saccade.support.errors import unsupported, value_error

if TYPE_CHECKING:
    from saccade.distributed.context_parallel import ContextParallel

CALLED_AS = "parallelize"  # the name in error messages

_NAME = "saccade-ranks-"
_KINDS = ("Model", "ForCausalLM", "LMHeadModel", "ForMaskedLM")  # models with one output per token
_POOLED = ("pooler_output", "mc_logits")
_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
_MIXERS = (_MaxPoolNd, _AvgPoolNd, _AdaptiveAvgPoolNd, _AdaptiveMaxPoolNd, _NormBase, nn.GroupNorm)
_names = (f"{_NAME}{number}" for number in itertools.count(1))


def parallelize(model: Any, cp: ContextParallel, mask: Mask | None) -> None:
    """Make each rank run a transformers model on its part of the sequence; see `saccade.distributed.parallelize`."""
    reasons = _reasons_against(model)
    reasons += [f"{name} is a {why}" for name, part in model.named_modules() if (why := why_it_mixes(part))]
    if reasons:
        hint = "add_pooling_layer=False removes a pooler; cp.attention(...) can be used in your own model"
        raise unsupported(type(model).__name__, reasons, hint=hint)
    name = registered(next(_names), attention := _Attention(cp, mask), attention.mask)
    model.set_attn_implementation(name)
    model.register_forward_pre_hook(attention.before, with_kwargs=True)
    model.register_forward_hook(attention.after)
    model.register_forward_hook(attention.end, always_call=True)


def why_it_mixes(part: nn.Module) -> str:
    """Return a description of a module that mixes tokens of the sequence, or "" if the module does not."""
    if isinstance(part, _MIXERS) or (isinstance(part, _ConvNd) and any(size > 1 for size in part.kernel_size)):
        return f"{type(part).__name__}, which mixes tokens"
    return ""


def _reasons_against(model: Any) -> list[str]:
    """Return the reasons why a transformers model cannot run on part of a sequence; the list is empty if it can."""
    name, config, parts = type(model).__name__, model.config.to_dict(), dict(model.named_modules())
    reasons = [f"{part} combines all tokens into one vector" for part in parts if part.rpartition(".")[2] == "pooler"]
    if str(model.config._attn_implementation).startswith(_NAME):
        reasons.append("it already runs over ranks")
    if not any(uses_attention_interface(part) for part in parts.values()):
        reasons.append("it computes its attention itself, without transformers' attention interface")
    if not name.endswith(_KINDS):
        reasons.append(f"{name} is not a known kind of model and may combine tokens")
    if model.config.is_encoder_decoder:
        reasons.append("cross-attention is not supported over ranks")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        reasons.append("it takes no position_ids, but a part of a sequence does not begin at 0")
    others = sorted({str(kind) for kinds in _values_of(config, "layer_types") for kind in kinds} - _LAYERS)
    reasons += [f"its {kind} layers see only this rank's rows" for kind in others]
    ropes = {str(kind) for key in ("rope_type", "type") for kind in _values_of(config, key)} & {"dynamic", "longrope"}
    reasons += [f"its {kind} positions depend on the length of the input" for kind in sorted(ropes)]
    if any(_values_of(config, "attn_temperature_tuning")):
        reasons.append("its attention is scaled by the index of each token in the input")
    if any(hasattr(part, "create_position_ids_from_input_ids") for part in parts.values()):
        reasons.append("it computes its own positions from the padding token")
    tables = [part for part in parts.values() if isinstance(part, nn.Embedding)]
    if any("attention_mask" in inspect.signature(part.forward).parameters for part in tables):
        reasons.append("it computes positions from attention_mask")
    return reasons


def _values_of(config: Any, key: str) -> Iterator[Any]:
    """Yield the values of a key in a transformers configuration and its nested configurations."""
    if isinstance(config, dict):
        for name, value in config.items():
            if name == key and value is not None:
                yield value
            yield from _values_of(value, key)


class _SequenceInfo(NamedTuple):
    """Data about the full sequence that all ranks share during one call to a transformers model.

    Attributes:
        lengths: lengths of the documents in each batch item; None for a single document.
        padding: ``[batch, seq_len]``, True at tokens; None without padding.
    """

    lengths: list[list[int]] | None
    padding: Tensor | None


class _Attention:
    """The attention function and mask function of a transformers model that runs across ranks."""

    def __init__(self, cp: ContextParallel, mask: Mask | None):
        self.cp, self.pattern = cp, mask
        self.sequence: _SequenceInfo | None = None

    def __deepcopy__(self, memo: object) -> _Attention:
        """Return the object itself, because transformers refers to it by a name that copies of the model share."""
        return self

    def before(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Add the positions of the local rows to a model call, and gather documents and padding from all ranks."""
        signature = inspect.signature(model.forward)
        arguments = dict(signature.bind_partial(*args, **kwargs).arguments)
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                arguments |= arguments.pop(name, {})
        self._check(model, arguments)
        rows: Any = arguments.get("input_ids", arguments.get("inputs_embeds"))
        if rows is None:
            raise value_error("input_ids", "be given", None)
        cp, seq_len = self.cp, self.cp.seq_len(rows.shape[1])
        ids, padding = arguments.get("position_ids"), arguments.get("attention_mask")
        if cp.checks:
            call = f"{type(model).__name__} {len(rows)} {seq_len} {ids is None} {padding is None} {self.pattern}"
            check_agreement(call, cp.group, rows.device)
        positions = cp.positions(seq_len, rows.device).expand(len(rows), -1)
        whole = None if ids is None else self._whole(ids.expand(len(rows), -1), seq_len)
        is_token = None if padding is None else self._whole(padding, seq_len).bool()
        is_token = None if is_token is None or bool(is_token.all()) else is_token
        self.sequence = _SequenceInfo(None if whole is None else _document_lengths(whole), is_token)
        # A mask of ones stops transformers from detecting documents: gaps in the positions are not document ends.
        ones = torch.ones_like(positions)
        arguments |= {"position_ids": positions if ids is None else ids, "attention_mask": ones}
        return (), arguments | ({"use_cache": False} if "use_cache" in signature.parameters else {})

    def after(self, model: Any, args: tuple[Any, ...], out: Any) -> None:
        """Raise an error if the model returns a pooled vector, which would cover only this rank's rows."""
        pooled = [name for name in _POOLED if getattr(out, name, None) is not None]
        if pooled:
            reason = f"{pooled[0]} combines all tokens, but each rank has only a part"
            raise unsupported(type(model).__name__, [reason])

    def end(self, *_: object) -> None:
        """Discard the documents and padding of the last model call."""
        self.sequence = None

    def _whole(self, x: Tensor, seq_len: int) -> Tensor:
        """Gather the rows of an integer tensor from all ranks."""
        return self.cp.unshard_sequence(x.double(), seq_len=seq_len).long()

    def _check(self, model: Any, arguments: dict[str, Any]) -> None:
        reasons = []
        if arguments.get("labels") is not None:
            reasons.append("the model shifts labels, but the next token may be on another rank")
        if arguments.get("past_key_values") is not None or arguments.get("use_cache"):
            reasons.append("it runs whole sequences over ranks, without a cache")
        if isinstance(chosen := arguments.get("logits_to_keep"), Tensor) or chosen:
            reasons.append("logits_to_keep would count this rank's rows, not those of the whole sequence")
        mask = arguments.get("attention_mask")
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
            reasons.append(
                "attention_mask is not [batch, rows]; pass a mask of the whole sequence as mask= of parallelize"
            )
        if reasons:
            hint = (
                "compute the loss from the logits: shift and shard the labels; divide the sum by the count of all ranks"
            )
            raise unsupported(type(model).__name__, reasons, hint=hint)

    def mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        mask_function: MaskFunction,
        device: torch.device | str = "cpu",
        **kwargs: Any,
    ) -> LazyMask:
        """Return the mask of the full sequence; transformers calls this as its mask function."""
        del kwargs  # they hold positions that treat this rank's rows as the full sequence
        sequence = self.sequence
        if sequence is None:
            hint = "call the model that was passed to parallelize, not a part of it or its forward"
            raise unsupported("a call", ["its arguments were not collected from all ranks"], hint=hint)
        mask = as_rule(mask_function)
        if not mask.is_value:
            reason = "the model's mask is a function, which may contain tensors of this rank's rows"
            raise unsupported(f"{mask}", [reason])
        lengths = None if sequence.lengths is None else tuple(map(tuple, sequence.lengths))
        if lengths is not None:
            mask = Documents(lengths, rule=mask)
        whole = range(kv_length if sequence.padding is None else sequence.padding.shape[1])
        placed = Placed(mask, whole, whole, lengths)
        if sequence.padding is not None:
            placed = with_padding(placed, sequence.padding)
        joined = placed.rule if self.pattern is None else with_pattern(placed, self.pattern)
        placed = Placed(joined, range(q_length), range(kv_length))
        reason = "the model reads its mask itself, but each rank has only a part of its rows"
        return LazyMask(placed, batch_size, torch.device(device), not_readable=reason)

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        **facts: Any,
    ) -> tuple[Tensor, None]:
        """Compute the attention of this rank's rows; transformers calls this as its attention function."""
        check_no_weights(module, facts)
        if not isinstance(attention_mask, LazyMask) or attention_mask.is_in_memory:
            reason = "its mask is a tensor of this rank's rows and does not cover other rows"
            raise unsupported(type(module).__name__, [reason])
        call = AttentionCall.of(module, query, key, attention_mask, facts)
        if not isinstance(call.placed, Placed):
            reason = "the ranks exchange keys according to the mask, but a traced program does not know its mask"
            raise unsupported("a compiled model", [reason], hint="compile the model's other modules")
        if call.bias is not None:
            reason = "its position bias is a tensor of this rank's rows and does not cover other rows"
            raise unsupported(type(module).__name__, [reason])
        out = self.cp.attention(
            query,
            key,
            value,
            call.placed.rule,
            seq_len=self.cp.seq_len(query.shape[2]),
            scale=call.scale,
            softcap=call.softcap,
            sink_logit=call.sink_logit,
            dropout_p=float(dropout),
        )
        return out.transpose(1, 2).contiguous(), None


def _document_lengths(ids: Tensor) -> list[list[int]] | None:
    """Return document lengths from ``position_ids`` that restart at 0; None if no batch item has several documents."""
    if bool((ids == torch.arange(ids.shape[1], device=ids.device)).all()):
        return None
    items = []
    for row in ids.tolist():
        starts = [index for index, number in enumerate(row) if number == 0]
        lengths = [stop - start for start, stop in itertools.pairwise([*starts, len(row)])]
        if row != [number for length in lengths for number in range(length)]:
            reason = "position_ids neither count the whole sequence nor restart at 0 with each text"
            raise unsupported("position_ids", [reason], hint="leave them out, or shard those of the whole batch")
        items.append(lengths)
    return items
