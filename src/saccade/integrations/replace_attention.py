"""replace_attention: run a model's attention on saccade, with the same weights."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from saccade.integrations import transformers
from saccade.integrations.forward_proxy import ForwardProxy
from saccade.integrations.other_packages import make_visible
from saccade.integrations.redirected_module import RedirectedModule, redirect
from saccade.integrations.replacement_base import StandIn, swap_in, temporarily_swapped
from saccade.integrations.replacement_modules import FusedAttention, TorchAttention, is_fused, keep_in_python
from saccade.integrations.replacement_plan import (
    MODULE,
    Replaced,
    ReplacementPlan,
    Replacements,
    check_names,
    checked_rules,
    is_within,
)
from saccade.integrations.scripted_code import is_program_with_attention, scripted_softmax_in
from saccade.integrations.transformers_call import uses_attention_interface
from saccade.masks import Mask
from saccade.mechanisms import Mechanism
from saccade.nn import MultiHeadAttention
from saccade.support.argument_hints import argument_hints
from saccade.support.errors import kind, type_error, unsupported
from saccade.support.validation import check_type

_SUPPORTED_ARGUMENTS = ("attn_mask", "is_causal")  # of a timm-style attention module, in addition to its input
_INSTALLED = "saccade-replaced"  # name in transformers of the attention with masks from `replace_attention`


@argument_hints({})
def replace_attention(
    model: nn.Module,
    *,
    mask: Mask | Mapping[str, Mask | None] | None = None,
    mechanism: Mechanism | None = None,
    leave: Collection[str] | None = None,
    cross_attention: Collection[str] | None = None,
    partial: bool = False,
) -> Replacements:
    """Run a model's attention on saccade with the same weights, names and outputs, in less time and memory.

    Attention is replaced in one of two ways. As *modules*, saccade replaces ``nn.MultiheadAttention`` with all its
    flags, alone or within ``nn.Transformer*``; attention modules with a single ``qkv`` projection, like timm's; and
    transformers models, as with `saccade.integrations.transformers.install`. In all other modules it replaces *calls*:
    they run their own code, but saccade computes their calls to torch's attention functions, and attention written as
    matmul, softmax and matmul. The modules remain the same objects, but their class becomes a subclass of the
    original: ``isinstance``, parameters, ``state_dict()``, hooks and attributes are unchanged, so optimizers,
    checkpoints and wrappers still work. Under ``torch.compile``, modules that run as calls run eagerly, with one
    warning.

    A single mask applies to self-attention only. A module is cross-attention if ``cross_attention`` names it, if its
    name or class name says so, as in ``cross_attn`` or ``EncDecAttention``, or if a call passes a second sequence, such
    as ``context=``. If none of these applies, a call with equally many queries and keys is self-attention, and so are
    the module's later calls with more keys, which come from a cache. A call that may be either raises an error.

    Args:
        model: any module tree; changed in place. The configuration of a transformers model is copied first.
        mask: one pattern for all self-attention; or a mapping from module names, with ``*`` for any characters, to
            patterns or None: ``{"encoder.*": Window(64, 64)}``. The first match applies. The pattern is combined with
            the mask of each call by ``&``. In transformers models that run as modules, its positions
            start at the first token of each sequence; see `saccade.integrations.transformers.install`. In calls, they
            start at the first key.
        mechanism: the mechanism to use; exact softmax when None. Each module gets a copy. Not supported for
            transformers models that run as modules. For calls, it must have no parameters.
        leave: names of modules whose attention is not replaced, with ``*`` for any characters: ``["decoder.pool"]``.
        cross_attention: names of the cross-attention modules, with ``*`` for any characters: ``["decoder.*.cross"]``;
            all others are then self-attention. When None, this is inferred from names and calls.
        partial: whether attention that saccade cannot run, such as a product with part of the weights, may stay in the
            model's own code. When False, the model's first run raises an error for it.

    Returns:
        The attention modules and how each one runs, in the order of the model's modules. Modules that run as calls are
        listed once they have run.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: no module of the model matches a name in ``leave``, ``mask`` or ``cross_attention``.
        UnsupportedError: the model contains unsupported attention; nothing is replaced. The model's first run raises
            it for attention that is only detected when it runs, if no attention runs, or if none runs in modules for
            which a mask was given.

    Cost: none, except that timm-style modules run twice on a small random input, before and after replacement.

    Example:
        >>> from saccade.masks import Window
        >>> model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2)
        >>> [one.name for one in replace_attention(model, mask=Window(128, 128))]
        ['layers.0.self_attn', 'layers.1.self_attn']
    """
    check_type("model", model, nn.Module, "be a module")
    if isinstance(mechanism, type):
        raise type_error(
            "mechanism", "be a saccade Mechanism or None", kind(mechanism), hint="pass an instance: Linear()"
        )
    check_type("mechanism", mechanism, (Mechanism, type(None)), "be a saccade Mechanism or None")
    check_type("partial", partial, bool, "be True or False")
    names = [name for name, _ in model.named_modules() if name]
    plan = ReplacementPlan(
        checked_rules(mask, cross_attention, names),
        copy.deepcopy(mechanism),
        _left_names(names, leave),
        partial,
        {name: number for number, (name, _) in enumerate(model.named_modules())},
    )
    parts = [*_parts(model, plan.left)]
    reasons = [
        f"{part.name or 'the model'} is {type(part.module).__name__}: {part.reason}" for part in parts if part.reason
    ]
    reasons += _reasons_against_mechanism(mechanism, parts)
    if all(part.name in plan.left for part in parts):
        reasons.append("it contains no supported attention module")
    if reasons:
        left = ", ".join(repr(part.name) for part in parts if part.reason and part.name)
        hint = f"leave=[{left}] keeps them unchanged; `saccade.mechanisms` and `saccade.nn` have parts for a new model"
        hint = hint if left else "`saccade.mechanisms` and `saccade.nn` have parts for a new model"
        raise unsupported(type(model).__name__, reasons, hint=hint)
    for part in parts:
        part.replace(plan)
    make_visible(model)
    for submodule in model.modules():
        if isinstance(submodule, nn.TransformerEncoder):
            # The fast path creates nested tensors, which replaced layers do not accept.
            submodule.use_nested_tensor = False
    return Replacements(plan.replaced, plan.order)


class _Part(NamedTuple):
    """A module or submodel that is replaced as a unit.

    Attributes:
        name: the module's name in the model.
        module: the module.
        method: "model" for a transformers model, "module" to swap in a saccade class, "calls" to redirect the attention
            calls in the module's own code.
        reason: the reason why the part cannot be replaced; "" if it can.
    """

    name: str
    module: nn.Module
    method: str
    reason: str = ""

    def replace(self, plan: ReplacementPlan) -> None:
        """Make the part run on saccade."""
        name, module = self.name, self.module
        if self.method == "calls":
            if isinstance(module, nn.MultiheadAttention) and name not in plan.left:
                module.register_forward_pre_hook(keep_in_python)  # so that torch's encoder layers call its forward
            redirect(module, plan, name)
            return
        if self.method == "model":
            plan.replaced.update((one.name, one) for one in _installed(name, module, plan))
            return
        before = type(module).__name__
        swap_in(
            module,
            TorchAttention if isinstance(module, nn.MultiheadAttention) else FusedAttention,
            plan.rules.of_module(name, module),
            plan.mechanism,
        )
        assert isinstance(module, StandIn)
        if isinstance(module, TorchAttention):
            module.is_cross, module.is_named = plan.rules.is_cross(name, module), plan.rules.is_by_name
        after = f"{type(module).__name__}, {type(module.mechanism).__name__}"
        plan.replaced[name] = Replaced(name, before, after, MODULE)


def _parts(model: nn.Module, left: Collection[str]) -> Iterator[_Part]:
    """Yield the parts of a model that are replaced, and the parts that cannot be replaced."""
    inside: list[str] = []
    has_calls = includes_root = False
    for name, module in model.named_modules():
        if name.startswith(tuple(inside)):
            continue
        part = _part(name, module, left)
        if part is not None and name in left:
            # Its calls must be attributed to this module, which is not replaced, and not to the enclosing module.
            part = None if _reason_against(module) else _Part(name, module, "calls")
        if part is not None:
            yield part
            if part.reason or part.method != "calls":
                inside.append(f"{name}." if name else "")
            has_calls = has_calls or part.method == "calls"
            includes_root = includes_root or not name
    if has_calls and not includes_root and _may_be_swapped(model):
        yield _Part("", model, "calls")  # a torch container; its first run reveals the attention in it


def _part(name: str, module: nn.Module, left: Collection[str]) -> _Part | None:
    """Choose how to replace a module; return None if it computes no attention itself.

    If some modules of a transformers model are in ``left``, only its calls are replaced, because the model's attention
    setting applies to all of its modules.
    """
    reason = _reason_against(module)
    if reason:
        return _Part(name, module, MODULE, reason)
    is_whole = not any(left_name.startswith(f"{name}." if name else "") for left_name in left)
    if is_pretrained(module) and is_whole and _runs_on_interface(module):
        return _Part(name, module, "model")
    if isinstance(module, nn.MultiheadAttention):
        is_plain = type(module).forward is nn.MultiheadAttention.forward and _is_unmodified(module)
        return _Part(name, module, MODULE if is_plain else "calls")
    if is_fused(module) and _is_unmodified(module) and _runs_as_fused(module):
        return _Part(name, module, MODULE)
    return _Part(name, module, "calls") if _has_own_code(module) else None


def _reason_against(module: nn.Module) -> str:
    """Return the reason why a module must not be replaced, or "" if there is none."""
    if isinstance(module, MultiHeadAttention | StandIn | RedirectedModule):
        return "it already runs on saccade; set its mask and mechanism instead"
    if is_program_with_attention(module):
        return "it is a traced program, in which attention is an operation; call replace_attention before tracing"
    scripted = scripted_softmax_in(module)
    if scripted:
        return f"it calls the scripted function {scripted}, in which a softmax is an operation; call it without script"
    forward = vars(module).get("forward")
    if isinstance(forward, ForwardProxy):
        return "it is being recorded or edited; call replace_attention before sc.record and sc.intervene"
    is_changed = forward is not None and isinstance(module, nn.MultiheadAttention)
    return "another library replaced its forward" if is_changed else ""


def _has_own_code(module: nn.Module) -> bool:
    """Return whether a module's class is third-party (neither torch nor saccade) with a ``forward`` in Python."""
    return not type(module).__module__.startswith(("torch.", "saccade.")) and _may_be_swapped(module)


def _may_be_swapped(module: nn.Module) -> bool:
    """Return whether a module's class can be swapped, because its ``forward`` is a Python method of the class."""
    is_script = isinstance(module, torch.jit.ScriptModule)
    return not (is_script or "forward" in vars(module) or inspect.isbuiltin(module.forward))


def _left_names(names: list[str], leave: Collection[str] | None) -> frozenset[str]:
    """Return the names of the modules whose attention is not replaced, including all modules within them.

    Raises:
        TypeError, ValueError: ``leave`` is not a list of module names.
    """
    rule = "be a list of names, or None"
    if isinstance(leave, str) or not isinstance(leave, Collection | None):
        raise type_error("leave", rule, kind(leave), hint="[name]")
    check_names("leave", [*(leave or ())], names)
    return frozenset(name for name in names if any(is_within(name, pattern) for pattern in leave or ()))


def is_pretrained(part: nn.Module) -> bool:
    """Return whether a module is a transformers model, even if transformers is not installed."""
    return any(kind.__name__ == "PreTrainedModel" for kind in type(part).__mro__)


def _is_unmodified(module: nn.Module) -> bool:
    """Return whether a module has no parametrization, instance ``forward``, ``mask`` or ``mechanism``."""
    has_attributes = any(hasattr(module, name) for name in ("mask", "mechanism"))
    return not (is_parametrized(module) or "forward" in vars(module) or has_attributes)


def _reasons_against_mechanism(mechanism: Mechanism | None, parts: list[_Part]) -> Iterator[str]:
    """Yield the reasons why parts of a model cannot run a mechanism other than exact softmax."""
    if mechanism is None:
        return
    for part in parts:
        if part.method == "model":
            yield f"{part.name or 'the model'} is a transformers model, which runs exact softmax"


def _runs_on_interface(model: Any) -> bool:
    """Return whether all attention of a transformers model goes through its attention interface."""
    if not any(uses_attention_interface(part) for part in model.modules()):
        return False
    # The flag is also False for models with a softcap or sinks, which saccade supports.
    return getattr(model, "_supports_sdpa", True) or not any(_computes_own_softmax(type(x)) for x in model.modules())


def _computes_own_softmax(kind: type[nn.Module]) -> bool:
    """Return whether an attention class of transformers computes its softmax without the attention interface."""
    if "attention" not in kind.__name__.lower() or not kind.__module__.startswith("transformers."):
        return False
    source = inspect.getsource(kind)
    return "softmax(" in source and "ALL_ATTENTION_FUNCTIONS" not in source


def _runs_as_fused(module: Any) -> bool:
    """Return whether a timm-style module and its replacement return the same output for a random input."""
    if any(name not in _SUPPORTED_ARGUMENTS for name in list(inspect.signature(type(module).forward).parameters)[2:]):
        return False
    width = module.qkv.in_features
    like = next(module.parameters())
    x = torch.randn(1, 5, width, generator=torch.Generator().manual_seed(0)).to(like.device, like.dtype)
    modes = [(part, part.training) for part in module.modules()]
    try:
        with torch.no_grad():
            theirs = module.eval()(x)
            with temporarily_swapped(module, FusedAttention):
                ours = module.eval()(x)
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return False
    finally:
        for part, mode in modes:
            part.training = mode
    is_same = isinstance(theirs, torch.Tensor) and theirs.shape == ours.shape
    return is_same and torch.allclose(theirs, ours, atol=1e-2 if like.dtype.itemsize < 4 else 1e-4)


def _installed(name: str, model: Any, plan: ReplacementPlan) -> Iterator[Replaced]:
    """Copy a transformers model's configuration, and make the model run on saccade; yield its attention modules."""
    _copy_configurations(model)
    before, after = model.config._attn_implementation, "saccade"
    # The innermost module computes the attention: BertAttention contains a BertSelfAttention.
    attentions = {path: part for path, part in model.named_modules() if _is_attention(part)}
    attentions = {
        f"{name}.{path}" if name else path: part
        for path, part in attentions.items()
        if not any(inner.startswith(f"{path}.") for inner in attentions)
    }
    if plan.rules.mask is None:
        transformers.install(after)
    else:
        after = transformers.install(_INSTALLED, mask=_mask_of)
        for path, part in attentions.items():
            vars(part)["_saccade_mask"] = plan.rules.of_module(path, part)
    model.set_attn_implementation(after)
    for path, part in attentions.items():
        yield Replaced(path, f"{type(part).__name__}, {before}", f"{type(part).__name__}, {after}", MODULE)


def _mask_of(module: nn.Module) -> Mask | None:
    """Return the mask that `replace_attention` assigned to a transformers attention module."""
    mask: Mask | None = vars(module).get("_saccade_mask")
    return mask


def _copy_configurations(model: nn.Module) -> None:
    """Replace a transformers model's configurations with copies, because other models may share them."""
    copies: dict[int, Any] = {}
    for part in model.modules():
        for name, x in vars(part).items():
            if any(base.__name__ in ("PreTrainedConfig", "PretrainedConfig") for base in type(x).__mro__):
                vars(part)[name] = copy.deepcopy(x, copies)


def _is_attention(part: nn.Module) -> bool:
    return uses_attention_interface(part) and type(part).__name__.endswith("Attention")
