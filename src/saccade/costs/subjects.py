"""Subjects of a cost forecast: masks, scores, mechanisms, layers and models on fake tensors, with their inputs."""

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

Inputs = Callable[[int], "Tensor | tuple[Tensor, ...]"]
"""A function that returns a module's arguments for a sequence length."""

_MODELS: Mapping[type, Callable[[Any], nn.Module]] = {
    EncoderConfig: Encoder,
    DecoderConfig: Decoder,
    EncoderDecoderConfig: EncoderDecoder,
}


class Sizes(NamedTuple):
    """Input sizes for forecasting the cost of a subject that does not define them, such as a mask."""

    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype


class Subject(NamedTuple):
    """A module whose cost is forecast, together with its inputs.

    Attributes:
        name: a short name for reports.
        module: the module; its tensors have shapes but no memory.
        inputs: a function that returns the module's inputs for a sequence length.
        options: additional arguments of each call.
        decodes: whether the module can continue token by token.
        device: the device of the module's tensors.
        heads: (num_heads, num_kv_heads, head_dim) of query, key and value; None for modules, which define their own.
    """

    name: str
    module: nn.Module
    inputs: Inputs
    options: dict[str, Any]
    decodes: bool
    device: str = "meta"
    heads: tuple[int, int, int] | None = None

    def without_memory(self) -> Subject:
        """Return a copy of the subject on fake tensors; call this within a `FakeTensorMode`."""
        return self._replace(module=_without_memory(self.module, "cpu"), device="cpu")

    def tensors(self, length: int) -> tuple[Tensor, ...]:
        """Return the module's inputs for a sequence length."""
        with torch.device(self.device):
            inputs = self.inputs(length)
        return inputs if isinstance(inputs, tuple) else (inputs,)

    def call(self, *inputs: Tensor, **options: Any) -> Any:
        """Call the module whose cost is forecast."""
        return self.module(*inputs, **self.options, **options)

    def cache_bytes(self, length: int) -> int:
        """Return the size of the subject's cache after ``length`` tokens, in bytes."""
        subject = self._replace(module=_with_any_kernel(self.module))
        if hasattr(subject.module, "new_cache"):
            cache: Cache | LayerCache = cast("Any", subject.module).new_cache()
            subject.call(*subject.tensors(length), cache=cache)
            return cache.nbytes
        layers = subject.filled(length)["past_key_values"].layers
        return sum(x.nbytes for layer in layers for x in (layer.keys, layer.values))

    def filled(self, length: int) -> dict[str, Any]:
        """Return the keyword argument, as a dict, that passes a cache of ``length`` tokens to the module.

        The dict is empty if the forecast of each attention product can itself account for the cached tokens.
        """
        if length == 0:
            return {}
        if hasattr(self.module, "new_cache"):
            if not any(getattr(part, "forecasts_with_cache", False) for part in self.module.modules()):
                return {}
            cache: Cache | LayerCache = cast("Any", self.module).new_cache()
            self.call(*self.tensors(length), cache=cache)
            return {"cache": cache}
        return {"past_key_values": self.call(*self.tensors(length), use_cache=True).past_key_values}


class _Product(nn.Module):
    """A layer that multiplies an attention matrix by values, for a forecast of its cost."""

    def __init__(self, mechanism: Mechanism):
        super().__init__()
        self.mechanism = mechanism

    def new_cache(self) -> LayerCache:
        return self.mechanism.new_cache()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, cache: LayerCache | None = None) -> Tensor:
        if cache is not None:
            return cache.attend(self.mechanism, query, key, value, mask=mask)
        return self.mechanism(query, key, mask=mask) @ value


def subject_of(
    subject: object, mask: object, sizes: Sizes, dtype: torch.dtype | None, inputs: Inputs | None
) -> Subject:
    """Convert the argument of `cost` to a subject with tensors on the "meta" device.

    Raises:
        TypeError: the kind of subject is unknown.
        UnsupportedError: the inputs of the module are unknown.
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
    inputs = _inputs_of(module, sizes) if inputs is None else inputs
    return _checked(Subject(type(module).__name__, module, inputs, options, _decodes(module, mask)))


def _checked(subject: Subject) -> Subject:
    """Return the subject; raise an error if the memory of one of its attention kernels cannot be forecast."""
    for mechanism in _softmaxes(subject.module):
        if mechanism.impl not in custom_op.KERNELS:
            reason = "the memory that it uses inside torch is not known before it runs"
            hint = f"impl can be one of {', '.join(custom_op.KERNELS)}"
            raise unsupported(f"impl={shown(mechanism.impl)}", [reason], hint=hint)
    return subject


def _softmaxes(module: nn.Module) -> list[Softmax]:
    return [x for x in module.modules() if isinstance(x, Softmax)]


def _with_any_kernel(module: nn.Module) -> nn.Module:
    """Copy a module with ``impl="auto"``, to measure its cache, which does not depend on the attention kernel."""
    copied = _without_memory(module, "meta")
    for mechanism in _softmaxes(copied):
        mechanism.impl = "auto"
    return copied


def _of_product(subject: Mask | Score | Mechanism | None, mask: object, sizes: Sizes) -> Subject:
    if isinstance(subject, Mask):
        if mask is not None:
            raise type_error("mask", "be left out if the subject is a mask", mask, hint="m1 & m2 is one mask")
        subject, mask = None, subject
    mechanism = subject if isinstance(subject, Mechanism) else Softmax(score=subject)
    pattern: Mask = mask if isinstance(mask, Mask) else as_mask(mask, (sizes.batch, sizes.num_heads, 1, 1))
    part = subject if subject is None or isinstance(subject, Score) else mechanism
    name = str(pattern) if part is None else f"{type(part).__name__}, {pattern}"
    heads = (sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads)

    def inputs(length: int) -> tuple[Tensor, ...]:
        shapes = [(sizes.batch, count, length, sizes.head_dim) for count in heads]
        return tuple(torch.zeros(shape, dtype=sizes.dtype, requires_grad=True) for shape in shapes)

    module = _Product(_without_memory(mechanism, "meta"))
    # The cache of a compressive memory depends on where its last segment began.
    decodes = pattern.is_causal and not isinstance(mechanism, CompressiveMemory)
    sizes_of_heads = (sizes.num_heads, sizes.num_kv_heads, sizes.head_dim)
    return Subject(name, module, inputs, {"mask": pattern}, decodes, heads=sizes_of_heads)


def all_tensors(module: nn.Module) -> list[Tensor]:
    """Return the parameters, buffers and plain tensor attributes of a module and its submodules without duplicates."""
    tensors = {id(x): x for x in (*module.parameters(), *module.buffers())}
    for part in module.modules():
        plain = {name: x for name, x in vars(part).items() if name not in ("_parameters", "_buffers", "_modules")}
        tensors |= {id(x): x for x in tree_leaves(plain) if isinstance(x, Tensor) and id(x) not in tensors}
    return list(tensors.values())


def _without_memory(module: Any, device: str) -> Any:
    """Copy a module for a cost forecast: its tensors have shapes but no memory, and no weights are copied."""
    memo: dict[int, Any] = {}
    for x in all_tensors(module):
        like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        memo[id(x)] = nn.Parameter(like, x.requires_grad) if isinstance(x, nn.Parameter) else like
    with unset_fake_temporarily():  # tensors inside other objects, such as masks, are copied with their values
        return copy.deepcopy(module, memo)


def _inputs_of(module: nn.Module, sizes: Sizes) -> Inputs:
    """Return a function that creates a module's inputs: token ids for a text model, embeddings for a layer."""
    config = getattr(module, "config", None)
    if isinstance(getattr(config, "vocab_size", None), int):
        texts = 2 if isinstance(module, EncoderDecoder) else 1
        return lambda length: (torch.zeros(sizes.batch, length, dtype=torch.long),) * texts
    width = next((x.embed_dim for x in module.modules() if isinstance(getattr(x, "embed_dim", None), int)), None)
    if isinstance(width, int):
        return lambda length: torch.zeros(sizes.batch, length, width, dtype=sizes.dtype, requires_grad=True)
    reason = "its inputs are unknown: it has neither config.vocab_size nor embed_dim"
    hint = "inputs=lambda length: torch.zeros(1, 3, length, length) gives its arguments"
    raise unsupported(type(module).__name__, [reason], hint=hint)


def _decodes(module: nn.Module, mask: object) -> bool:
    config = getattr(module, "config", None)
    if isinstance(module, EncoderDecoder):
        return False
    if hasattr(module, "new_cache"):
        return config is not None or bool(getattr(mask, "is_causal", False))
    return bool(getattr(config, "use_cache", False)) and not getattr(config, "is_encoder_decoder", False)
