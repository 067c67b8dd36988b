"""cost(): forecast operations, memory and time of attention, a layer or a model."""

from __future__ import annotations

import dataclasses
import os
from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._pytree import tree_leaves

from saccade.costs.dry_run import DryRun, Operation, dry, unsupported_dry_run
from saccade.costs.machine import Machine, Seconds, this_machine
from saccade.costs.subjects import Inputs, Sizes, Subject, all_tensors, subject_of
from saccade.support.argument_hints import argument_hints
from saccade.support.columns import left_aligned, right_aligned
from saccade.support.errors import type_error, value_error
from saccade.support.language import translated
from saccade.support.validation import check_int, check_type, is_number


class Share(NamedTuple):
    """The share of a forecast cost that comes from all operations with the same name.

    Attributes:
        calls: number of operations.
        flops: floating-point operations of matrix products.
        bytes_moved: bytes read and written.
    """

    calls: int
    flops: int
    bytes_moved: int


class Pass(NamedTuple):
    """A forecast run: its operations and its peak memory.

    Attributes:
        steps: the operations, in order.
        peak_bytes: peak memory of all tensors: weights, inputs, results, and in training also gradients, tensors saved
            for the backward pass and the optimizer's tensors.
    """

    steps: tuple[Operation, ...]
    peak_bytes: int

    @property
    def flops(self) -> int:
        """Number of floating-point operations in matrix products, two for each multiply-add."""
        return sum(step.flops for step in self.steps)

    @property
    def bytes_moved(self) -> int:
        """Bytes read and written, counting each tensor once per operation."""
        return sum(step.moved for step in self.steps)

    def shares(self) -> dict[str, Share]:
        """Return the cost of each kind of operation, sorted by decreasing floating-point operations."""
        shares: dict[str, Share] = defaultdict(lambda: Share(0, 0, 0))
        for step in self.steps:
            calls, flops, moved = shares[step.name]
            shares[step.name] = Share(calls + 1, flops + step.flops, moved + step.moved)
        return dict(sorted(shares.items(), key=lambda item: (-item[1].flops, -item[1].bytes_moved)))

    def __repr__(self) -> str:
        return f"Pass({self.flops:,} FLOPs, {self.bytes_moved:,} bytes moved, {self.peak_bytes:,} bytes at most)"


_HEADS = ", {num_heads} heads of {head_dim} channels"
_GROUPED = ", {num_heads} query heads and {num_kv_heads} key heads of {head_dim} channels"


@dataclasses.dataclass(frozen=True)
class Cost:
    """The forecast that `cost` returns; print it for a report.

    Attributes:
        subject: name of the subject.
        seq_len, batch, dtype: sizes and dtype of the inputs.
        parameter_bytes: bytes of all weights, buffers and other tensors of the modules.
        forward: a forward pass without gradients.
        training: a forward pass, its loss and all gradients.
        decode: a decoding step after ``seq_len - 1`` tokens; None for a subject that does not decode.
        cache_bytes: bytes of the cache after ``seq_len`` tokens; None for a subject that does not decode.
        heads: (num_heads, num_kv_heads, head_dim) of query, key and value; None for layers and models, which define
            their own.
    """

    subject: str
    seq_len: int
    batch: int
    dtype: torch.dtype
    parameter_bytes: int
    forward: Pass
    training: Pass
    decode: Pass | None
    cache_bytes: int | None
    heads: tuple[int, int, int] | None = None

    def fits(self, memory: float | None = None, *, training: bool = False) -> bool:
        """Return whether the forecast tensors fit in memory.

        Args:
            memory: bytes of memory; by default, the memory of this machine. Python and torch need additional memory.
            training: whether a training step must fit, rather than only a forward pass.

        Raises:
            ValueError: ``memory`` is None and unknown on this system.
        """
        memory = _memory() if memory is None else memory
        if not is_number(memory) or memory < 0:
            raise value_error("memory", "be a number of bytes of at least 0", memory, hint="24 * 2**30")
        most = self.training if training else max(self.forward, self.decode or self.forward, key=lambda x: x.peak_bytes)
        return most.peak_bytes <= memory

    def seconds(self, machine: Machine | None = None) -> Seconds:
        """Estimate the time of each run on this machine's processor, with torch's current number of threads.

        Args:
            machine: the measured machine; by default, `saccade.costs.this_machine`.

        Cost: a few seconds for each kind of operation that has not yet been measured on this machine.
        """
        here = this_machine() if machine is None else check_type("machine", machine, Machine, "be a Machine")
        decode = None if self.decode is None else here.seconds(self.decode.steps)
        return Seconds(here.seconds(self.forward.steps), here.seconds(self.training.steps), decode)

    def __str__(self) -> str:
        about = {"subject": self.subject, "tokens": self.seq_len, "batch": self.batch, "dtype": _short(self.dtype)}
        rows = [("", translated("FLOPs"), translated("moved"), translated("at most"))]
        for name in ("forward", "training", "decode"):
            run: Pass | None = getattr(self, name)
            if run is not None:
                sizes = _count(run.flops), _size(run.bytes_moved), _size(run.peak_bytes)
                rows.append((translated(name), *sizes))
        lines = [
            f"{left_aligned(name, 10)} {right_aligned(flops, 10)} {right_aligned(moved, 12)} {right_aligned(most, 12)}"
            for name, flops, moved, most in rows
        ]
        first = translated("cost of {subject} at {tokens:,} tokens, batch {batch}, {dtype}", **about)
        if self.heads is not None:
            num_heads, num_kv_heads, head_dim = self.heads
            words = _HEADS if num_heads == num_kv_heads else _GROUPED
            first += translated(words, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
        last = translated("weights {weights}", weights=_size(self.parameter_bytes))
        last += "" if self.cache_bytes is None else translated(", cache {cache}", cache=_size(self.cache_bytes))
        return "\n".join([first, *lines, last])

    __repr__ = __str__


_HINTS = {
    **dict.fromkeys(("length", "tokens", "n", "max_len", "context"), "seq_len=, the number of tokens"),
    **dict.fromkeys(("heads", "n_heads"), "num_heads="),
    **dict.fromkeys(("kv_heads", "n_kv_heads"), "num_kv_heads="),
    **dict.fromkeys(("batch_size", "bs"), "batch="),
    **dict.fromkeys(
        ("ranks", "num_ranks", "world_size", "devices", "gpus"),
        "saccade.distributed.exchange(mask, seq_len, num_heads, ranks=8) plans a sequence that is split across ranks",
    ),
    **dict.fromkeys(("causal", "is_causal"), "cost(masks.Causal(), seq_len), or mask=masks.Causal() with a mechanism"),
}


@argument_hints(
    _HINTS, subject="a mask, as cost(masks.Causal(), 4096), a score, a mechanism, a layer, a model or a config"
)
def cost(
    subject: object,
    seq_len: int,
    *,
    mask: object = None,
    batch: int = 1,
    num_heads: int = 8,
    num_kv_heads: int | None = None,
    head_dim: int = 64,
    dtype: torch.dtype | None = None,
    inputs: Inputs | None = None,
    optimizer_tensors: int = 2,
) -> Cost:
    """Forecast the operations, memory traffic and peak memory of attention, a layer or a model.

    Every operation runs on tensors that have shapes but no memory; products with attention matrices use the forecast of
    their kernel on this machine's processor.

    Args:
        subject: a mask, a score or a mechanism (applied to query, key and value tensors); a layer; a saccade or
            transformers model, or any module together with ``inputs``; or the config of an encoder or decoder that has
            not been built yet.
        seq_len: number of tokens.
        mask: the mask for a score, a mechanism, or a layer that accepts one.
        batch: number of sequences.
        num_heads, num_kv_heads, head_dim: sizes of query, key and value; layers and models define their own.
        dtype: dtype of weights and floating-point inputs; by default, the dtype of the module, or float32.
        inputs: a function that returns the module's arguments for a sequence length, for modules whose input is neither
            tokens nor embeddings ``[batch, seq_len, embed_dim]``.
        optimizer_tensors: number of values that the optimizer stores per weight: 2 for Adam, 0 for plain SGD.

    Returns:
        A `Cost` on one machine. `saccade.distributed.exchange` forecasts a sequence that is split across ranks.

    Raises:
        TypeError, ValueError: sizes do not match, or the kind of subject is unknown.
        UnsupportedError: the operations depend on the values of tensors.

    Cost: three dry runs, a second or two; chunked mechanisms take about a second for 4,000 tokens.

    Example:
        >>> from saccade import masks
        >>> forecast = cost(masks.sliding_window(256), 16384)
        >>> forecast.forward.flops < cost(masks.Causal(), 16384).forward.flops / 10
        True
        >>> forecast.fits(2 * 2**30, training=True)
        True
    """
    sizes = Sizes(
        batch=check_int("batch", batch, 1),
        num_heads=check_int("num_heads", num_heads, 1),
        num_kv_heads=num_heads if num_kv_heads is None else check_int("num_kv_heads", num_kv_heads, 1),
        head_dim=check_int("head_dim", head_dim, 1),
        dtype=torch.float32 if dtype is None else _float_dtype(dtype),
    )
    if sizes.num_heads % sizes.num_kv_heads:
        raise value_error("num_kv_heads", f"divide num_heads={num_heads}", num_kv_heads)
    length = check_int("seq_len", seq_len, 1, hint="it is a number of tokens, as in cost(model, ids.shape[1])")
    states = check_int("optimizer_tensors", optimizer_tensors, 0)
    case = subject_of(subject, mask, sizes, dtype, inputs)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        cache_bytes = _cache_bytes(case, length)
        with mode:
            case = case.without_memory()
            weights = sum(x.nbytes for x in all_tensors(case.module))
        runs = _forward(case, mode, length), _training(case, mode, length, states)
        decode = None if cache_bytes is None else _decoding(case, mode, length, cache_bytes)
    except RuntimeError as error:
        reads_values = isinstance(error, DataDependentOutputException | DynamicOutputShapeException)
        if reads_values or "meta tensors" in str(error):
            raise unsupported_dry_run(error) from error
        raise
    kinds = {x.dtype for x in case.module.parameters() if x.is_floating_point()}
    dtype = next(iter(kinds), sizes.dtype)
    return Cost(case.name, length, batch, dtype, weights, *runs, decode, cache_bytes, case.heads)


def _forward(subject: Subject, mode: FakeTensorMode, length: int) -> Pass:
    """Forecast a forward pass without gradients, in evaluation mode."""
    subject.module.eval()
    with mode:
        inputs = subject.tensors(length)
    with dry(DryRun(_bytes(subject.module, inputs)), mode) as run, torch.no_grad():
        subject.call(*inputs)
    return Pass(tuple(run.steps), run.most)


def _training(subject: Subject, mode: FakeTensorMode, length: int, optimizer_tensors: int) -> Pass:
    """Forecast a training step: forward pass, loss and gradients, plus the optimizer's tensors but not its operations.

    The loss is the cross entropy of the next token for models with token inputs, and a mean for all others.
    """
    subject.module.train()
    with mode:
        inputs = subject.tensors(length)
    states = optimizer_tensors * sum(x.nbytes for x in subject.module.parameters() if x.requires_grad)
    with dry(DryRun(_bytes(subject.module, inputs) + states), mode) as run, torch.enable_grad():
        loss = _loss(subject.call(*inputs), subject.module)
        loss.backward()
    return Pass(tuple(run.steps), run.most)


def _decoding(subject: Subject, mode: FakeTensorMode, length: int, cache_bytes: int) -> Pass:
    """Forecast a decoding step for one token after ``length - 1`` cached tokens."""
    subject.module.eval()
    with dry(DryRun(), mode), torch.no_grad():
        inputs = subject.tensors(1)
        options = subject.filled(length - 1)
    run = DryRun(_bytes(subject.module, inputs) + cache_bytes, past=0 if options else length - 1)
    with dry(run, mode), torch.no_grad():
        subject.call(*inputs, **options)
    return Pass(tuple(run.steps), run.most)


def _bytes(module: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """Return the bytes of a module's tensors and inputs before a forecast run, counting shared memory once."""
    tensors = (*all_tensors(module), *inputs)
    return sum({id(x.untyped_storage()): x.untyped_storage().nbytes() for x in tensors}.values())


def _loss(output: Any, module: nn.Module) -> Tensor:
    logits = getattr(output, "logits", None)
    if logits is None:
        logits = next(x for x in tree_leaves(output) if isinstance(x, Tensor))
    vocab = getattr(getattr(module, "config", None), "vocab_size", None)
    if logits.shape[-1] == vocab:
        targets = torch.zeros(logits.shape[:-1], dtype=torch.long)
        return nn.functional.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())
    return logits.float().mean()


def _cache_bytes(subject: Subject, length: int) -> int | None:
    if not subject.decodes:
        return None
    subject.module.eval()
    with torch.no_grad():
        return subject.cache_bytes(length)


def _float_dtype(dtype: object) -> torch.dtype:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise type_error("dtype", "be a float dtype", dtype, hint="torch.bfloat16")
    return dtype


def _memory() -> int:
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" not in names:
        raise value_error("memory", "be given, since this system does not report its memory", None)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(number: float) -> str:
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if number >= 2**power:
            return f"{_digits(number / 2**power)} {unit}"
    return f"{number} B"


def _count(number: float) -> str:
    for unit, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{_digits(number / scale)} {unit}"
    return str(number)


def _digits(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"
