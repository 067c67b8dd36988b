"""replace_attention: run the attention of a model on saccade, with the same weights."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from saccade.integrations import transformers
from saccade.integrations.capture_context import uses_attention_interface
from saccade.integrations.replacement_modules import FusedAttention, TorchAttention, is_fused
from saccade.integrations.stand_in import StandIn, put_in, tried
from saccade.integrations.written_out import written_out
from saccade.masks import Mask
from saccade.mechanisms import Mechanism
from saccade.nn import MultiHeadAttention
from saccade.support.argument_hints import argument_hints
from saccade.support.errors import kind, shown, type_error, unsupported, value_error
from saccade.support.validation import check_type

_TAKEN = ("attn_mask", "is_causal")  # supported arguments of a timm-style attention besides its input
_names = (f"saccade-{number}" for number in itertools.count(1))


class Replaced(NamedTuple):
    """An attention module that was replaced.

    Attributes:
        name: the module's name in the model.
        before, after: descriptions of the attention before and after.
    """

    name: str
    before: str
    after: str


@argument_hints({})
def replace_attention(
    model: nn.Module,
    *,
    mask: Mask | None = None,
    mechanism: Mechanism | None = None,
    leave: Collection[str] | None = None,
    cross_attention: Collection[str] | None = None,
) -> tuple[Replaced, ...]:
    """Run a model's attention on saccade with the same weights, names and outputs, in less time and memory.

    Supported are ``nn.MultiheadAttention`` with all its flags, by itself and in ``nn.Transformer*``; attention modules
    with a single ``qkv`` projection, like timm's; and transformers models, which run as with
    `saccade.integrations.transformers.install`. The modules remain the same objects, but their class becomes a subclass
    of the original: ``isinstance``, parameters, ``state_dict()``, hooks and attributes are unchanged, so optimizers,
    checkpoints and wrappers still work.

    A mask applies to self-attention only. An ``nn.MultiheadAttention`` counts as cross-attention, and gets no mask, if
    it is the ``multihead_attn`` of a torch decoder layer, if ``cross_attention`` names it, or in calls whose query and
    key differ in length. It counts as self-attention if query and key are the same tensor, or have equal values in the
    first call (``attn(norm(x), norm(x), norm(x))``). If their values differ there, the call is refused, unless
    ``cross_attention`` is given: then all modules that it does not name are self-attention.

    Args:
        model: any module tree; changed in place.
        mask: a pattern for every self-attention, joined with the mask of each call by ``&``. In transformers models,
            its positions start at the first token of each text; see `saccade.integrations.transformers.install`.
        mechanism: the mechanism to use; exact softmax when None. Each attention gets a copy. Not supported for
            transformers models.
        leave: names of modules whose attention is not replaced, with ``*`` for any characters: ``["decoder.pool"]``.
        cross_attention: names of the ``nn.MultiheadAttention`` modules that are cross-attention, with ``*`` for any
            characters: ``["decoder.*.cross"]``. When None, each call decides.

    Returns:
        The attention modules that were replaced, in the order of the model's modules.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: no module of the model matches a name in ``leave``, or no ``nn.MultiheadAttention`` matches a name
            in ``cross_attention``.
        UnsupportedError: the model contains unsupported attention, or no attention. The error lists all unsupported
            modules, and nothing is replaced. This includes modules whose own ``forward`` computes attention: it
            multiplies the result of a softmax, or calls torch's attention functions.

    Cost: none, except that timm-style modules are run on a few random numbers, once before and once after.

    Example:
        >>> from saccade.masks import Window
        >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2)
        >>> [one.name for one in replace_attention(model, mask=Window(128, 128))]
        ['layers.0.self_attn', 'layers.1.self_attn']
    """
    check_type("model", model, nn.Module, "be a module")
    check_type("mask", mask, (Mask, type(None)), "be a saccade mask or None", hint="a tensor goes to each call")
    if isinstance(mechanism, type):
        raise type_error("mechanism", "be a saccade Mechanism or None", kind(mechanism), hint="make one: Linear()")
    check_type("mechanism", mechanism, (Mechanism, type(None)), "be a saccade Mechanism or None")
    left = _left(model, leave)
    attentions = [one for one in _attentions(model) if one[0] not in left]
    attentions += [one for one in _written_out(model, [name for name, _, _ in attentions]) if one[0] not in left]
    reasons = [f"{name or 'the model'} is {type(part).__name__}: {why}" for name, part, why in attentions if why]
    reasons += [
        f"{name or 'the model'} is a model of transformers, which runs exact softmax; mechanism= is for others"
        for name, part, _ in attentions
        if mechanism is not None and is_pretrained(part)
    ]
    if not attentions:
        reasons.append("no part of it is an attention that is known here")
    cross = _cross(model, attentions, cross_attention)
    if reasons:
        names = ", ".join(repr(name) for name, _, why in attentions if why and name)
        hint = f"leave=[{names}] leaves them as they are; `saccade.mechanisms` and `saccade.nn` build one's own"
        hint = hint if names else "`saccade.mechanisms` and `saccade.nn` build attention of one's own"
        raise unsupported(type(model).__name__, reasons, hint=hint)
    replaced: list[Replaced] = []
    for name, part, _ in attentions:
        if is_pretrained(part):
            replaced += _installed(name, part, mask)
            continue
        before = type(part).__name__
        put_in(part, TorchAttention if isinstance(part, nn.MultiheadAttention) else FusedAttention, mask, mechanism)
        if isinstance(part, TorchAttention):
            part.is_cross = cross.get(part)
        replaced.append(Replaced(name, before, f"{type(part).__name__}, {type(part.mechanism).__name__}"))
    for part in model.modules():
        if isinstance(part, nn.TransformerEncoder):
            part.use_nested_tensor = False  # its fast path makes nested tensors, which replaced layers do not accept
    return tuple(replaced)


def _attentions(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield attention modules and transformers models: name, module, and why it cannot be replaced ("" if it can)."""
    inside: list[str] = []
    for name, part in model.named_modules():
        if any(name.startswith(outer) for outer in inside):
            continue
        why: str | None = None
        if is_pretrained(part):
            why = _against_model(part)
        elif isinstance(part, MultiHeadAttention | StandIn):
            why = "it runs on saccade already; its mask and mechanism can be set"
        elif isinstance(part, nn.MultiheadAttention):
            is_other = type(part).forward is not nn.MultiheadAttention.forward
            why = "its forward is not that of nn.MultiheadAttention" if is_other else _against_object(part)
        elif is_fused(part):
            why = _against_fused(part)
        elif "attention" in type(part).__name__.lower() and any(True for _ in part.parameters()):
            inner = [name_of for name_of, other in part.named_modules() if name_of and _is_known(other)]
            why = None if inner else "how it computes is not known here"
        if why is None:
            continue
        if not name and not is_pretrained(part):
            why = why or "it is itself the attention, and there is no model to put another into"
        inside.append(f"{name}." if name else "")
        yield name, part, why


def _written_out(model: nn.Module, known: list[str]) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield modules that compute attention in their own code, except known modules and parts of transformers models."""
    within = tuple(f"{name}." for name in known if not is_pretrained(model.get_submodule(name)))
    for name, part in model.named_modules():
        why = "" if name in known or f"{name}.".startswith(within) else written_out(part)
        if why:
            yield name, part, why


def _left(model: nn.Module, leave: Collection[str] | None) -> set[str]:
    """Return the names of the modules whose attention is not replaced, including all modules within them.

    Raises:
        TypeError, ValueError: ``leave`` does not consist of names of modules.
    """
    rule = "be a list of names, or None"
    if isinstance(leave, str) or not isinstance(leave, Collection | None):
        raise type_error("leave", rule, kind(leave), hint="[name]")
    names, left = [name for name, _ in model.named_modules() if name], set[str]()
    for pattern in leave or ():
        check_type("leave", pattern, str, rule)
        matches = [name for name in names if fnmatchcase(name, pattern)]
        if not matches:
            raise value_error("leave", "hold names of modules of the model", repr(pattern))
        left.update(name for name in names if f"{name}.".startswith(tuple(f"{one}." for one in matches)))
    return left


def _is_known(part: nn.Module) -> bool:
    return isinstance(part, nn.MultiheadAttention) or is_fused(part)


def is_pretrained(part: nn.Module) -> bool:
    """Return whether a module is a transformers model, even if transformers is not installed."""
    return any(kind.__name__ == "PreTrainedModel" for kind in type(part).__mro__)


def _against_object(part: nn.Module) -> str:
    """Return the reason why an attention module of a supported class cannot run on saccade, or "" if it can."""
    if is_parametrized(part):
        return "its weights are computed from others, by parametrizations"
    if "forward" in vars(part):
        return "its forward was changed on the object, by a recording that has not ended or by another library"
    taken = [name for name in ("mask", "mechanism") if hasattr(part, name)]
    return f"its attribute {taken[0]} is one that saccade sets" if taken else ""


def _against_model(model: Any) -> str:
    """Return the reason why a transformers model cannot run on saccade's attention, or "" if it can."""
    if not any(uses_attention_interface(part) for part in model.modules()):
        return "it computes its attention itself, without transformers' attention interface"
    if getattr(model, "_supports_sdpa", True):
        return ""
    # The flag is also False for models with a softcap or sinks, which saccade runs.
    by_hand = sorted({type(part).__name__ for part in model.modules() if _is_by_hand(type(part))})
    return f"its {', '.join(by_hand)} compute attention by their own code alone" if by_hand else ""


def _is_by_hand(kind: type[nn.Module]) -> bool:
    """Return whether an attention class of transformers computes its softmax without the attention interface."""
    if "attention" not in kind.__name__.lower() or not kind.__module__.startswith("transformers."):
        return False
    source = inspect.getsource(kind)
    return "softmax(" in source and "ALL_ATTENTION_FUNCTIONS" not in source


def _against_fused(module: Any) -> str:
    """Return the reason why a timm-style module cannot be replaced, or "" if it can, by a test on random inputs."""
    against = _against_object(module)
    if against:
        return against
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
            with tried(module, FusedAttention):
                ours = module.eval()(x)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        return f"it could not be tried: {str(error).splitlines()[0]}"
    finally:
        for part, mode in modes:
            part.training = mode
    is_same = isinstance(theirs, torch.Tensor) and theirs.shape == ours.shape
    if is_same and torch.allclose(theirs, ours, atol=1e-2 if like.dtype.itemsize < 4 else 1e-4):
        return ""
    return "it computes something else than softmax attention with these parts"


def _cross(
    model: nn.Module, attentions: list[tuple[str, nn.Module, str]], cross_attention: Collection[str] | None
) -> dict[nn.Module, bool]:
    """Return whether each attention module is cross-attention, if that is known without a call.

    Raises:
        TypeError, ValueError: ``cross_attention`` does not consist of names of attention modules.
    """
    known: dict[nn.Module, bool] = {}
    names = {name: part for name, part, _ in attentions if isinstance(part, nn.MultiheadAttention)}
    if cross_attention is not None:
        rule = "be a list of names, or None"
        if isinstance(cross_attention, str) or not isinstance(cross_attention, Collection):
            raise type_error("cross_attention", rule, shown(cross_attention), hint="[name]")
        for pattern in cross_attention:
            check_type("cross_attention", pattern, str, rule)
            if not any(fnmatchcase(name, pattern) for name in names):
                hint = f"its nn.MultiheadAttention are {', '.join(names) or 'none'}"
                rule = "hold names of nn.MultiheadAttention in the model"
                raise value_error("cross_attention", rule, repr(pattern), hint=hint)
        known = {part: any(fnmatchcase(name, one) for one in cross_attention) for name, part in names.items()}
    decoders = (part for part in model.modules() if isinstance(part, nn.TransformerDecoderLayer))
    return known | {layer.multihead_attn: True for layer in decoders}


def _installed(name: str, model: Any, mask: Mask | None) -> Iterator[Replaced]:
    before = model.config._attn_implementation
    after = transformers.install(next(_names), mask=mask)
    model.set_attn_implementation(after)
    # The innermost module computes the attention: BertAttention contains a BertSelfAttention.
    attentions = {path: part for path, part in model.named_modules() if _is_attention(part)}
    for path, part in attentions.items():
        if not any(inner.startswith(f"{path}.") for inner in attentions):
            full = f"{name}.{path}" if name else path
            yield Replaced(full, f"{type(part).__name__}, {before}", f"{type(part).__name__}, {after}")


def _is_attention(part: nn.Module) -> bool:
    return uses_attention_interface(part) and type(part).__name__.endswith("Attention")
