"""Subjects: masks, scores, mechanisms, layers and models, as modules of shapes alone and what they are given."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves

from saccade.caches import Cache, LayerCache
from saccade.engine import custom_op
from saccade.masks import Mask, as_mask
from saccade.mechanisms import CompressiveMemory, Mechanism, Softmax
from saccade.models import (
    Decoder,
    DecoderConfig,
    Encoder,
    EncoderConfig,
    EncoderDecoder,
    EncoderDecoderConfig,
)
from saccade.scores import Score
from saccade.support.errors import kind, shown, type_error, unsupported

__all__ = ["Inputs", "Sizes", "Subject", "held_tensors", "made"]

Inputs = Callable[[int], "Tensor | tuple[Tensor, ...]"]
"""What a module is called with, of a length."""

_MODELS: Mapping[type, Callable[[Any], nn.Module]] = {
    EncoderConfig: Encoder,
    DecoderConfig: Decoder,
    EncoderDecoderConfig: EncoderDecoder,
}


class Sizes(NamedTuple):
    """Sizes of what is attended with, where the subject does not say them."""

    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype


class Subject(NamedTuple):
    """Something whose cost is asked for.

    Attributes:
        name: in a few words.
        module: on the device that was asked for; its tensors have shapes and no memory.
        inputs: its tensors, of a length.
        options: what else each call is given.
        decodes: whether it can go on token by token.
        device: where its tensors are.
    """

    name: str
    module: nn.Module
    inputs: Inputs
    options: dict[str, Any]
    decodes: bool
    device: str = "meta"

    def without_memory(self) -> Subject:
        """The same on the processor, called inside of a mode in which tensors have shapes alone."""
        return self._replace(module=_without_memory(self.module, "cpu"), device="cpu")

    def given(self, length: int) -> tuple[Tensor, ...]:
        """Its tensors."""
        with torch.device(self.device):
            made = self.inputs(length)
        return made if isinstance(made, tuple) else (made,)

    def called(self, *given: Tensor, **options: Any) -> Any:
        """What it makes of its tensors."""
        return self.module(*given, **self.options, **options)

    def cache_bytes(self, length: int) -> int:
        """What its cache holds after so many tokens."""
        alone = self._replace(module=_of_any_kernel(self.module))
        if hasattr(alone.module, "new_cache"):
            cache: Cache | LayerCache = cast("Any", alone.module).new_cache()
            alone.called(*alone.given(length), cache=cache)
            return cache.nbytes
        held = alone.filled(length)["past_key_values"]
        return sum(x.nbytes for layer in held.layers for x in (layer.keys, layer.values))

    def filled(self, length: int) -> dict[str, Any]:
        """What a call gets that goes on after so many tokens, for a model whose cache can be had without memory."""
        if length == 0 or hasattr(self.module, "new_cache"):
            return {}
        return {"past_key_values": self.called(*self.given(length), use_cache=True).past_key_values}


class _Product(nn.Module):
    """A product of attention as a layer."""

    def __init__(self, mechanism: Mechanism):
        super().__init__()
        self.mechanism = mechanism

    def new_cache(self) -> LayerCache:
        return self.mechanism.new_cache()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, cache: LayerCache | None = None) -> Tensor:
        if cache is not None:
            return cache.attend(self.mechanism, query, key, value, mask=mask)
        return self.mechanism(query, key, mask=mask) @ value


def made(subject: object, mask: object, sizes: Sizes, dtype: torch.dtype | None, inputs: Inputs | None) -> Subject:
    """A subject whose tensors are on the device "meta".

    Raises:
        TypeError: it is none.
        UnsupportedError: nobody knows what the module is given.
    """
    if isinstance(subject, Mask | Score | Mechanism | None):
        return _checked(_of_product(subject, mask, sizes))
    if type(subject) in _MODELS:
        with torch.device("meta"):
            module = _MODELS[type(subject)](subject)
    elif isinstance(subject, nn.Module):
        module = _without_memory(subject, "meta")
    else:
        rule = "be a mask, a score, a mechanism, a module or a model's config"
        raise type_error("subject", rule, kind(subject), hint="cost(masks.Causal(), 4096)")
    module = module if dtype is None else module.to(dtype)
    sizes = sizes._replace(dtype=next((x.dtype for x in module.parameters() if x.is_floating_point()), sizes.dtype))
    options = {} if mask is None else {"mask": mask}
    own = _inputs_of(module, sizes) if inputs is None else inputs
    return _checked(Subject(type(module).__name__, module, own, options, _decodes(module, mask)))


def _checked(subject: Subject) -> Subject:
    """The same; raises where a kernel is asked for by name that does not say what it holds."""
    for mechanism in _softmaxes(subject.module):
        if mechanism.impl not in custom_op.KERNELS:
            reason = "what it runs inside of torch holds is not known before it is run"
            hint = f"impl can be one of {', '.join(custom_op.KERNELS)}"
            raise unsupported(f"impl={shown(mechanism.impl)}", [reason], hint=hint)
    return subject


def _softmaxes(module: nn.Module) -> list[Softmax]:
    return [x for x in module.modules() if isinstance(x, Softmax)]


def _of_any_kernel(module: nn.Module) -> nn.Module:
    """The same for a cache, which holds the same whatever the kernel; some of them run on processors alone."""
    alone = _without_memory(module, "meta")
    for mechanism in _softmaxes(alone):
        mechanism.impl = "auto"
    return alone


def _of_product(subject: Mask | Score | Mechanism | None, mask: object, sizes: Sizes) -> Subject:
    if isinstance(subject, Mask):
        if mask is not None:
            where_left = "be left out where the subject is a mask"
            raise type_error("mask", where_left, mask, hint="m1 & m2 is one mask")
        subject, mask = None, subject
    mechanism = subject if isinstance(subject, Mechanism) else Softmax(score=subject)
    rule: Mask = mask if isinstance(mask, Mask) else as_mask(mask, (sizes.batch, sizes.num_heads, 1, 1))
    named = subject if subject is None or isinstance(subject, Score) else mechanism
    name = str(rule) if named is None else f"{type(named).__name__}, {rule}"
    heads = (sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads)

    def inputs(length: int) -> tuple[Tensor, ...]:
        shapes = [(sizes.batch, count, length, sizes.head_dim) for count in heads]
        return tuple(torch.zeros(shape, dtype=sizes.dtype, requires_grad=True) for shape in shapes)

    module = _Product(_without_memory(mechanism, "meta"))
    # What a compressive memory holds beside its sum depends on where the last segment began.
    return Subject(
        name, module, inputs, {"mask": rule}, rule.is_causal and not isinstance(mechanism, CompressiveMemory)
    )


def held_tensors(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a module, and tensors that its parts hold as plain attributes, each once."""
    found = {id(x): x for x in (*module.parameters(), *module.buffers())}
    for part in module.modules():
        plain = {name: x for name, x in vars(part).items() if name not in ("_parameters", "_buffers", "_modules")}
        found |= {id(x): x for x in tree_leaves(plain) if isinstance(x, Tensor) and id(x) not in found}
    return list(found.values())


def _without_memory(module: Any, device: str) -> Any:
    """Return a copy whose tensors have shapes alone: nothing of the size of its weights is copied."""
    alone: dict[int, Any] = {}
    for x in held_tensors(module):
        like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        alone[id(x)] = nn.Parameter(like, x.requires_grad) if isinstance(x, nn.Parameter) else like
    with unset_fake_temporarily():  # tensors within other objects, such as masks, are copied with what they hold
        return copy.deepcopy(module, alone)


def _inputs_of(module: nn.Module, sizes: Sizes) -> Inputs:
    """Tokens for a model of tokens, vectors for a layer."""
    config = getattr(module, "config", None)
    if isinstance(getattr(config, "vocab_size", None), int):
        texts = 2 if isinstance(module, EncoderDecoder) else 1
        return lambda length: (torch.zeros(sizes.batch, length, dtype=torch.long),) * texts
    width = next((x.embed_dim for x in module.modules() if isinstance(getattr(x, "embed_dim", None), int)), None)
    if isinstance(width, int):
        return lambda length: torch.zeros(sizes.batch, length, width, dtype=sizes.dtype, requires_grad=True)
    reason = "nobody can tell its inputs: it has neither config.vocab_size nor embed_dim"
    hint = "inputs=lambda length: torch.zeros(1, 3, length, length) says what it is called with"
    raise unsupported(type(module).__name__, [reason], hint=hint)


def _decodes(module: nn.Module, mask: object) -> bool:
    config = getattr(module, "config", None)
    if isinstance(module, EncoderDecoder):
        return False
    if hasattr(module, "new_cache"):
        return config is not None or bool(getattr(mask, "is_causal", False))
    return bool(getattr(config, "use_cache", False)) and not getattr(config, "is_encoder_decoder", False)
