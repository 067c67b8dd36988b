"""Models of transformers over ranks: their attention function, and what their masks say of the whole sequence."""

from __future__ import annotations

import inspect
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from saccade.distributed.transfer import agree
from saccade.errors import unsupported, value_error
from saccade.integrations.attention_call import AttentionCall
from saccade.integrations.lazy_mask import LazyMask, Placed
from saccade.integrations.mask_functions import MaskFunction, as_rule
from saccade.integrations.replacing import is_pretrained
from saccade.integrations.transformers import registered
from saccade.integrations.transformers_tap import speaks_attention_interface
from saccade.integrations.weights_asked import check_no_weights
from saccade.masks import Documents, Mask, from_key_padding_mask

if TYPE_CHECKING:
    from saccade.distributed.context import ContextParallel

__all__ = ["is_pretrained", "parallelize", "why_it_mixes"]

_WHERE = "parallelize"
_KINDS = ("Model", "ForCausalLM", "LMHeadModel", "ForMaskedLM")  # whose outputs are those of each token
_names = (f"saccade-ranks-{number}" for number in itertools.count(1))


def parallelize(model: Any, cp: ContextParallel, mask: Mask | None) -> None:
    """Let a model of transformers run on a part of a sequence on every rank; see `saccade.distributed.parallelize`."""
    reasons = [f"{name} is a {why}" for name, part in model.named_modules() if (why := why_it_mixes(part))]
    reasons += [f"{name} makes one vector of all tokens" for name, part in model.named_modules() if _pools(name, part)]
    if not any(speaks_attention_interface(part) for part in model.modules()):
        reasons.append("it computes its attention itself, without transformers' attention interface")
    if not type(model).__name__.endswith(_KINDS):
        reasons.append(f"what {type(model).__name__} makes of all tokens is not known here")
    if model.config.is_encoder_decoder:
        reasons.append("over ranks there is no cross-attention")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        reasons.append("it takes no position_ids, and a part of a sequence does not begin at 0")
    if reasons:
        hint = "add_pooling_layer=False leaves a pooler out; cp.attention(...) runs in a model of your own"
        raise unsupported(_WHERE, type(model).__name__, reasons, hint=hint)
    name = registered(_WHERE, next(_names), attention := _Attention(cp, mask), attention.mask)
    model.set_attn_implementation(name)
    model.register_forward_pre_hook(attention.before, with_kwargs=True)


def why_it_mixes(part: nn.Module) -> str:
    """What a module is that mixes neighbours; empty for any other."""
    if isinstance(part, nn.Conv1d | nn.Conv2d | nn.Conv3d) and any(size > 1 for size in part.kernel_size):
        return f"{type(part).__name__}, which mixes neighbours"
    return ""


def _pools(name: str, part: nn.Module) -> bool:
    return name.rpartition(".")[2] == "pooler"


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
        self.facts = _Facts(None, None)

    def before(
        self, model: Any, args: tuple[Any, ...], given: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before the model runs: where the rows stand, and the facts of all ranks."""
        known = inspect.signature(model.forward)
        bound = known.bind_partial(*args, **given).arguments
        named = {**bound, **bound.pop("kwargs", {})}
        self._check(model, named)
        rows: Any = named.get("input_ids", named.get("inputs_embeds"))
        if rows is None:
            raise value_error(_WHERE, "input_ids", "be given", None)
        cp, seq_len = self.cp, self.cp.seq_len(rows.shape[1])
        ids, padding = named.get("position_ids"), named.get("attention_mask")
        told = f"{type(model).__name__} {len(rows)} {seq_len} {ids is None} {padding is None} {self.own}"
        agree(told, cp.group, rows.device, _WHERE)
        own = cp.positions(seq_len, rows.device).expand(len(rows), -1)
        whole = None if ids is None else self._whole(ids.expand(len(rows), -1), seq_len)
        there = None if padding is None else self._whole(padding, seq_len).bool()
        self.facts = _Facts(
            None if whole is None else _lengths(whole), None if there is None or bool(there.all()) else there
        )
        # With a mask of ones transformers looks for no texts of its own: positions that jump are not their ends.
        ones = torch.ones_like(own)
        named |= {"position_ids": own if ids is None else ids, "attention_mask": ones}
        return (), named | ({"use_cache": False} if "use_cache" in known.parameters else {})

    def _whole(self, x: Tensor, seq_len: int) -> Tensor:
        """A table of whole numbers of all rows."""
        return self.cp.unshard_sequence(x.double(), seq_len=seq_len).long()

    def _check(self, model: Any, named: dict[str, Any]) -> None:
        reasons = []
        if named.get("labels") is not None:
            reasons.append("labels are shifted in the model, where the next token may be another rank's")
        if named.get("past_key_values") is not None or named.get("use_cache"):
            reasons.append("it runs whole sequences over ranks, without a cache")
        mask = named.get("attention_mask")
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
            reasons.append("attention_mask is not [batch, rows]; mask= of parallelize is one of the whole sequence")
        if reasons:
            hint = "losses of the logits: labels shifted, then sharded; their sum over the count of all ranks"
            raise unsupported(_WHERE, type(model).__name__, reasons, hint=hint)

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
        rule = as_rule(mask_function)
        if not rule.is_value:
            reason = "the model's mask is a function, which may hold tensors of this rank's rows"
            raise unsupported(_WHERE, f"{rule}", [reason])
        if self.facts.lengths is not None:
            rule = Documents(self.facts.lengths, rule=rule)
        if self.facts.padding is not None:
            rule = rule & from_key_padding_mask(~self.facts.padding)
        rule = rule if self.own is None else rule & self.own
        return LazyMask(Placed(rule, range(q_length), range(kv_length)), batch_size, torch.device(device))

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
        check_no_weights(_WHERE, module, facts)
        if not isinstance(attention_mask, LazyMask) or attention_mask.is_in_memory:
            reason = "its mask is a tensor of this rank's rows, and says nothing of others"
            raise unsupported(_WHERE, type(module).__name__, [reason])
        call = AttentionCall.of(_WHERE, module, query, key, attention_mask, facts)
        if call.bias is not None:
            reason = "its position bias is a tensor of this rank's rows, and says nothing of others"
            raise unsupported(_WHERE, type(module).__name__, [reason])
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
            raise unsupported(
                _WHERE, "position_ids", [reason], hint="leave them out, or shard those of the whole batch"
            )
        found.append(lengths)
    return found
