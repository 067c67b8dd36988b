"""replace_attention: our attention in the place of whatever a model has, its weights untouched."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from saccade.arguments import instance
from saccade.calls import answers
from saccade.errors import kind, type_error, unsupported
from saccade.integrations import transformers
from saccade.integrations.stand_ins import FusedAttention, TorchAttention, is_fused
from saccade.integrations.transformers_tap import speaks_attention_interface
from saccade.masks import Mask
from saccade.mechanisms import Mechanism
from saccade.nn import MultiHeadAttention

__all__ = ["Replaced", "replace_attention"]

_TAKEN = ("attn_mask", "is_causal")  # of a timm-style attention, besides its input
_names = (f"saccade-{number}" for number in itertools.count(1))


class Replaced(NamedTuple):
    """One attention that was replaced.

    Attributes:
        name: of the module in its model.
        before, after: what kind it was, and what runs now.
    """

    name: str
    before: str
    after: str


@answers("replace_attention", {})
def replace_attention(
    model: nn.Module, *, mask: Mask | None = None, mechanism: Mechanism | None = None
) -> tuple[Replaced, ...]:
    """Let a model run on our attention: its weights, names and outputs stay, time and memory do not.

    Understood are ``nn.MultiheadAttention`` with all its flags, by itself and in ``nn.Transformer*``; attentions with
    one projection ``qkv``, as timm's; and models of transformers, as `saccade.integrations.transformers.install` runs
    them. Parameters are the same objects as before, under the same names, so that optimizers and checkpoints fit.

    Args:
        model: any module tree; changed in place.
        mask: a pattern for every self-attention, joined with what each call brings by ``&``. In models of
            transformers it counts from the first token of each text; see `saccade.integrations.transformers.install`.
        mechanism: which matrix; exact softmax when None. Each attention gets a copy. Not for models of transformers.

    Returns:
        What was replaced, in the order of the model's modules.

    Raises:
        TypeError: no module, mask or mechanism.
        UnsupportedError: an attention in it is of none of these kinds, or there is none: all are named, and nothing is
            replaced.

    Cost: nothing; timm-style attentions are run once on a few random numbers, before and after.

    Example:
        >>> from saccade.masks import Window
        >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2)
        >>> [one.name for one in replace_attention(model, mask=Window(128, 128))]
        ['layers.0.self_attn', 'layers.1.self_attn']
    """
    where = "replace_attention"
    instance(where, "model", model, nn.Module, "be a module")
    instance(where, "mask", mask, (Mask, type(None)), "be a saccade mask or None", hint="a tensor goes to each call")
    if isinstance(mechanism, type):
        raise type_error(
            where, "mechanism", "be a saccade Mechanism or None", kind(mechanism), hint="make one: Linear()"
        )
    instance(where, "mechanism", mechanism, (Mechanism, type(None)), "be a saccade Mechanism or None")
    found = list(_found(model))
    reasons = [f"{name or 'the model'} is {type(part).__name__}: {why}" for name, part, why in found if why]
    reasons += [
        f"{name or 'the model'} is a model of transformers, which runs exact softmax; mechanism= is for others"
        for name, part, _ in found
        if mechanism is not None and is_pretrained(part)
    ]
    if not found:
        reasons.append("no part of it is an attention that is known here")
    if reasons:
        hint = "replace_attention(part) takes a part of a model; `saccade.mechanisms` and `saccade.nn` build one's own"
        raise unsupported(where, type(model).__name__, reasons, hint=hint)
    made = [(name, part, _made(name, part, mask, mechanism)) for name, part, _ in found if not is_pretrained(part)]
    replaced = []
    for name, part, new in made:
        for parent in list(model.modules()):  # several may share it, and one may have it twice
            for own, child in list(parent._modules.items()):
                if child is part:
                    setattr(parent, own, new)
        replaced.append(Replaced(name, type(part).__name__, f"{type(new).__name__}, {type(new.mechanism).__name__}"))
    for part in model.modules():
        if isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False  # its fast path takes tokens out of a batch, for layers that take none
    for name, part, _ in found:
        if is_pretrained(part):
            replaced += _installed(name, part, mask)
    return tuple(replaced)


def _found(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Attentions and whole models of transformers: name, module, and why it cannot be replaced, or nothing."""
    inside: list[str] = []
    for name, part in model.named_modules():
        if any(name.startswith(outer) for outer in inside):
            continue
        why: str | None = None
        if is_pretrained(part):
            why = _against_model(part)
        elif isinstance(part, nn.MultiheadAttention):
            is_own = type(part).forward is not nn.MultiheadAttention.forward
            why = "its forward is not that of nn.MultiheadAttention" if is_own else _against_weights(part)
        elif isinstance(part, MultiHeadAttention | TorchAttention | FusedAttention):
            why = "it runs on saccade already; its mask and mechanism can be set"
        elif is_fused(part):
            why = _against_fused(part)
        elif "attention" in type(part).__name__.lower() and any(True for _ in part.parameters()):
            inner = [own for own, other in part.named_modules() if own and _is_known(other)]
            why = None if inner else "how it computes is not known here"
        if why is None:
            continue
        if not name and not is_pretrained(part):
            why = why or "it is itself the attention, and there is no model to put another into"
        inside.append(f"{name}." if name else "")
        yield name, part, why


def _is_known(part: nn.Module) -> bool:
    return isinstance(part, nn.MultiheadAttention) or is_fused(part)


def is_pretrained(part: nn.Module) -> bool:
    """Whether it is a model of transformers, which need not be installed."""
    return any(kind.__name__ == "PreTrainedModel" for kind in type(part).__mro__)


def _against_weights(part: nn.Module) -> str:
    return "its weights are computed from others, by parametrizations" if is_parametrized(part) else ""


def _against_model(model: Any) -> str:
    """Return why a model of transformers cannot run on our attention; "" if it can."""
    if not any(speaks_attention_interface(part) for part in model.modules()):
        return "it computes its attention itself, without transformers' attention interface"
    if getattr(model, "_supports_sdpa", True):
        return ""
    # transformers says so of models with a softcap or sinks, which we run, and of models with softmaxes of their own.
    by_hand = sorted({type(part).__name__ for part in model.modules() if _is_by_hand(type(part))})
    return f"its {', '.join(by_hand)} compute attention by their own code alone" if by_hand else ""


def _is_by_hand(kind: type[nn.Module]) -> bool:
    """Return whether an attention of transformers computes its softmax without the attention interface."""
    if "attention" not in kind.__name__.lower() or not kind.__module__.startswith("transformers."):
        return False
    source = inspect.getsource(kind)
    return "softmax(" in source and "ALL_ATTENTION_FUNCTIONS" not in source


def _against_fused(module: Any) -> str:
    """Run both on a few random numbers: names alone do not say what a module computes."""
    more = [name for name in list(inspect.signature(type(module).forward).parameters)[2:] if name not in _TAKEN]
    if more:
        return f"its forward takes {', '.join(more)} too"
    width = module.qkv.in_features
    like = next(module.parameters())
    x = torch.randn(1, 5, width, generator=torch.Generator().manual_seed(0)).to(like.device, like.dtype)
    modes = [(part, part.training) for part in module.modules()]
    try:
        with torch.no_grad():
            theirs = module.eval()(x)
            ours = FusedAttention(module).eval()(x)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        return f"it could not be tried: {str(error).splitlines()[0]}"
    finally:
        for part, mode in modes:
            part.training = mode
    is_same = isinstance(theirs, torch.Tensor) and theirs.shape == ours.shape
    if is_same and torch.allclose(theirs, ours, atol=1e-2 if like.dtype.itemsize < 4 else 1e-4):
        return ""
    return "it computes something else than softmax attention with these parts"


def _made(name: str, part: nn.Module, mask: Mask | None, mechanism: Mechanism | None) -> Any:
    if isinstance(part, nn.MultiheadAttention):
        return TorchAttention(part, mask, mechanism)
    return FusedAttention(part, mask, mechanism)


def _installed(name: str, model: Any, mask: Mask | None) -> Iterator[Replaced]:
    before = model.config._attn_implementation
    after = transformers.install(next(_names), mask=mask)
    model.set_attn_implementation(after)
    for own, part in model.named_modules():
        if speaks_attention_interface(part) and type(part).__name__.endswith("Attention"):
            whole = f"{name}.{own}" if name else own
            yield Replaced(whole, f"{type(part).__name__}, {before}", f"{type(part).__name__}, {after}")
