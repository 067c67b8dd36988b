"""Models of transformers over ranks: their attention function, and what their masks say of the whole sequence."""

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

from saccade.distributed.collectives import agree
from saccade.integrations.attention_arguments import check_no_weights
from saccade.integrations.attention_call import AttentionCall
from saccade.integrations.capture_context import uses_attention_interface
from saccade.integrations.lazy_mask import LazyMask, Placed
from saccade.integrations.mask_functions import MaskFunction, as_rule, with_padding
from saccade.integrations.pattern_in_texts import with_pattern
from saccade.integrations.replace_attention import is_pretrained
from saccade.integrations.transformers import registered
from saccade.masks import Documents, Mask
from saccade.support.errors import unsupported, value_error

if TYPE_CHECKING:
    from saccade.distributed.context_parallel import ContextParallel

__all__ = ["is_pretrained", "parallelize", "why_it_mixes"]

CALLED_AS = "parallelize"  # in errors

_NAME = "saccade-ranks-"
_KINDS = ("Model", "ForCausalLM", "LMHeadModel", "ForMaskedLM")  # whose outputs are those of each token
_POOLED = ("pooler_output", "mc_logits")
_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
_MIXERS = (_MaxPoolNd, _AvgPoolNd, _AdaptiveAvgPoolNd, _AdaptiveMaxPoolNd, _NormBase, nn.GroupNorm)
_names = (f"{_NAME}{number}" for number in itertools.count(1))


def parallelize(model: Any, cp: ContextParallel, mask: Mask | None) -> None:
    """Let a model of transformers run on a part of a sequence on every rank; see `saccade.distributed.parallelize`."""
    reasons = _against(model)
    reasons += [f"{name} is a {why}" for name, part in model.named_modules() if (why := why_it_mixes(part))]
    if reasons:
        hint = "add_pooling_layer=False leaves a pooler out; cp.attention(...) runs in a model of your own"
        raise unsupported(type(model).__name__, reasons, hint=hint)
    name = registered(next(_names), attention := _Attention(cp, mask), attention.mask)
    model.set_attn_implementation(name)
    model.register_forward_pre_hook(attention.before, with_kwargs=True)
    model.register_forward_hook(attention.after)
    model.register_forward_hook(attention.end, always_call=True)


def why_it_mixes(part: nn.Module) -> str:
    """What a module is that mixes tokens; empty for any other."""
    if isinstance(part, _MIXERS) or (isinstance(part, _ConvNd) and any(size > 1 for size in part.kernel_size)):
        return f"{type(part).__name__}, which mixes tokens"
    return ""


def _against(model: Any) -> list[str]:
    """Why a model as a whole cannot run on a part of a sequence; empty if it can."""
    name, config, parts = type(model).__name__, model.config.to_dict(), dict(model.named_modules())
    reasons = [f"{own} makes one vector of all tokens" for own in parts if own.rpartition(".")[2] == "pooler"]
    if str(model.config._attn_implementation).startswith(_NAME):
        reasons.append("it runs over ranks already")
    if not any(uses_attention_interface(part) for part in parts.values()):
        reasons.append("it computes its attention itself, without transformers' attention interface")
    if not name.endswith(_KINDS):
        reasons.append(f"what {name} makes of all tokens is not known here")
    if model.config.is_encoder_decoder:
        reasons.append("over ranks there is no cross-attention")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        reasons.append("it takes no position_ids, and a part of a sequence does not begin at 0")
    others = sorted({str(kind) for kinds in _said(config, "layer_types") for kind in kinds} - _LAYERS)
    reasons += [f"its layers of {kind} see the own rows alone" for kind in others]
    ropes = {str(kind) for key in ("rope_type", "type") for kind in _said(config, key)} & {"dynamic", "longrope"}
    reasons += [f"its {kind} positions follow the length of what it is called with" for kind in sorted(ropes)]
    if any(_said(config, "attn_temperature_tuning")):
        reasons.append("its attention is scaled by where tokens stand in what it is called with")
    if any(hasattr(part, "create_position_ids_from_input_ids") for part in parts.values()):
        reasons.append("it counts positions of its own, from the padding token on")
    tables = [part for part in parts.values() if isinstance(part, nn.Embedding)]
    if any("attention_mask" in inspect.signature(part.forward).parameters for part in tables):
        reasons.append("it reads positions off attention_mask")
    return reasons


def _said(config: Any, key: str) -> Iterator[Any]:
    """What a configuration says under a key, wherever in it that stands."""
    if isinstance(config, dict):
        for name, value in config.items():
            if name == key and value is not None:
                yield value
            yield from _said(value, key)


class _Facts(NamedTuple):
    """What is known of the whole sequence in one call of the model.

    Attributes:
        lengths: of the texts of each item; None for one.
        padding: tokens that are there, ``[batch, seq_len]``; None for all.
    """

    lengths: list[list[int]] | None
    padding: Tensor | None


class _Attention:
    """The attention function of one model, and its mask function."""

    def __init__(self, cp: ContextParallel, mask: Mask | None):
        self.cp, self.own = cp, mask
        self.facts: _Facts | None = None

    def __deepcopy__(self, memo: object) -> _Attention:
        """Itself: it is known to transformers by its name, which a copied model keeps."""
        return self

    def before(
        self, model: Any, args: tuple[Any, ...], given: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before the model runs: where the rows stand, and the facts of all ranks."""
        known = inspect.signature(model.forward)
        named = dict(known.bind_partial(*args, **given).arguments)
        for name, parameter in known.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                named |= named.pop(name, {})
        self._check(model, named)
        rows: Any = named.get("input_ids", named.get("inputs_embeds"))
        if rows is None:
            raise value_error("input_ids", "be given", None)
        cp, seq_len = self.cp, self.cp.seq_len(rows.shape[1])
        ids, padding = named.get("position_ids"), named.get("attention_mask")
        if cp.checks:
            told = f"{type(model).__name__} {len(rows)} {seq_len} {ids is None} {padding is None} {self.own}"
            agree(told, cp.group, rows.device)
        own = cp.positions(seq_len, rows.device).expand(len(rows), -1)
        whole = None if ids is None else self._whole(ids.expand(len(rows), -1), seq_len)
        there = None if padding is None else self._whole(padding, seq_len).bool()
        self.facts = _Facts(
            None if whole is None else _lengths(whole), None if there is None or bool(there.all()) else there
        )
        # With a mask of ones transformers looks for no texts of its own: positions that jump are not their ends.
        named |= {"position_ids": own if ids is None else ids, "attention_mask": torch.ones_like(own)}
        return (), named | ({"use_cache": False} if "use_cache" in known.parameters else {})

    def after(self, model: Any, args: tuple[Any, ...], out: Any) -> None:
        """Refuse an output that is one vector of this rank's rows."""
        pooled = [name for name in _POOLED if getattr(out, name, None) is not None]
        if pooled:
            reason = f"{pooled[0]} is made of all tokens, of which each rank has a part"
            raise unsupported(type(model).__name__, [reason])

    def end(self, *_: object) -> None:
        """What was known of a call holds for no other."""
        self.facts = None

    def _whole(self, x: Tensor, seq_len: int) -> Tensor:
        """A table of whole numbers of all rows."""
        return self.cp.unshard_sequence(x.double(), seq_len=seq_len).long()

    def _check(self, model: Any, named: dict[str, Any]) -> None:
        reasons = []
        if named.get("labels") is not None:
            reasons.append("labels are shifted in the model, where the next token may be another rank's")
        if named.get("past_key_values") is not None or named.get("use_cache"):
            reasons.append("it runs whole sequences over ranks, without a cache")
        if isinstance(kept := named.get("logits_to_keep"), Tensor) or kept:
            reasons.append("logits_to_keep counts the own rows, not those of the whole")
        mask = named.get("attention_mask")
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
            reasons.append("attention_mask is not [batch, rows]; mask= of parallelize is one of the whole sequence")
        if reasons:
            hint = "losses of the logits: labels shifted, then sharded; their sum over the count of all ranks"
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
        """The mask function: a rule of the whole sequence. Its arguments are those of transformers' own."""
        del kwargs  # where this rank's rows would stand, were they the whole
        facts = self.facts
        if facts is None:
            hint = "call the model that was handed to parallelize, not a part of it, nor its forward"
            raise unsupported("a call", ["what all ranks know of it was not asked for"], hint=hint)
        rule = as_rule(mask_function)
        if not rule.is_value:
            reason = "the model's mask is a function, which may hold tensors of this rank's rows"
            raise unsupported(f"{rule}", [reason])
        texts = None if facts.lengths is None else tuple(map(tuple, facts.lengths))
        if texts is not None:
            rule = Documents(texts, rule=rule)
        whole = range(kv_length if facts.padding is None else facts.padding.shape[1])
        placed = Placed(rule, whole, whole, texts)
        if facts.padding is not None:
            placed = with_padding(placed, facts.padding)
        joined = placed.rule if self.own is None else with_pattern(placed, self.own)
        placed = Placed(joined, range(q_length), range(kv_length))
        reason = "the model reads its mask itself, and each rank has a part of its rows"
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
        """The attention function, as transformers calls it."""
        check_no_weights(module, facts)
        if not isinstance(attention_mask, LazyMask) or attention_mask.is_in_memory:
            reason = "its mask is a tensor of this rank's rows, and says nothing of others"
            raise unsupported(type(module).__name__, [reason])
        call = AttentionCall.of(module, query, key, attention_mask, facts)
        if call.bias is not None:
            reason = "its position bias is a tensor of this rank's rows, and says nothing of others"
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


def _lengths(ids: Tensor) -> list[list[int]] | None:
    """Lengths of texts, whose positions begin at 0 each; None where each item is one text."""
    if bool((ids == torch.arange(ids.shape[1], device=ids.device)).all()):
        return None
    found = []
    for row in ids.tolist():
        starts = [place for place, number in enumerate(row) if number == 0]
        lengths = [stop - start for start, stop in itertools.pairwise([*starts, len(row)])]
        if row != [number for length in lengths for number in range(length)]:
            reason = "position_ids are neither those of the whole sequence nor of texts that count from 0"
            raise unsupported("position_ids", [reason], hint="leave them out, or shard those of the whole batch")
        found.append(lengths)
    return found
