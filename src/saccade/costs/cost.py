"""cost(): operations, memory and time of attention, a layer or a model, before it is run."""

from __future__ import annotations

import dataclasses
import os

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from saccade.costs.cases import Inputs, Sizes, Subject, held_tensors, made
from saccade.costs.dry_run import refuse_dry
from saccade.costs.machine import Machine, this_machine
from saccade.costs.passes import Pass, decoding, forward, training
from saccade.costs.time_estimate import Seconds
from saccade.support.argument_hints import answers
from saccade.support.errors import type_error, value_error
from saccade.support.validation import check_int, check_type, is_number

__all__ = ["Cost", "cost"]


@dataclasses.dataclass(frozen=True)
class Cost:
    """What `cost` says; print it.

    Attributes:
        subject: what it is of, in a few words.
        seq_len, batch, dtype: of the inputs.
        parameter_bytes: of all weights, buffers and other tensors that its modules hold.
        forward: a run without gradients.
        training: a run, its loss and all gradients.
        decode: one token more, after ``seq_len - 1``; None for what does not go on token by token.
        cache_bytes: what the cache holds after ``seq_len`` tokens; None likewise.
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

    def fits(self, memory: float | None = None, *, training: bool = False) -> bool:
        """Whether tensors find room.

        Args:
            memory: bytes that there are; the memory of this machine when None. Python and torch take some themselves.
            training: whether a training step has to fit, not only a forward run.

        Raises:
            ValueError: no memory is given, and this system does not say how much it has.
        """
        memory = _memory() if memory is None else memory
        if not is_number(memory) or memory < 0:
            raise value_error("memory", "be a number of bytes of at least 0", memory, hint="24 * 2**30")
        most = self.training if training else max(self.forward, self.decode or self.forward, key=lambda x: x.peak_bytes)
        return most.peak_bytes <= memory

    def seconds(self, machine: Machine | None = None) -> Seconds:
        """How long each run takes, on this machine's processor and with as many threads as torch has now.

        Args:
            machine: which one; `saccade.costs.this_machine` when None.

        Cost: what has not been measured of this machine is, once: some seconds for each kind of operation.
        """
        here = this_machine() if machine is None else check_type("machine", machine, Machine, "be a Machine")
        decode = None if self.decode is None else here.seconds(self.decode.steps)
        return Seconds(here.seconds(self.forward.steps), here.seconds(self.training.steps), decode)

    def __str__(self) -> str:
        lines = [f"cost of {self.subject} at {self.seq_len:,} tokens, batch {self.batch}, {_short(self.dtype)}"]
        lines.append(f"{'':<10} {'FLOPs':>10} {'moved':>12} {'at most':>12}")
        for name in ("forward", "training", "decode"):
            one: Pass | None = getattr(self, name)
            if one is not None:
                told = f"{_count(one.flops):>10} {_size(one.bytes_moved):>12} {_size(one.peak_bytes):>12}"
                lines.append(f"{name:<10} {told}")
        cache = "" if self.cache_bytes is None else f", cache {_size(self.cache_bytes)}"
        return "\n".join([*lines, f"weights {_size(self.parameter_bytes)}{cache}"])


_WORDS = {
    **dict.fromkeys(("length", "tokens", "n", "max_len", "context"), "seq_len=, how many tokens"),
    **dict.fromkeys(("heads", "n_heads"), "num_heads="),
    **dict.fromkeys(("kv_heads", "n_kv_heads"), "num_kv_heads="),
    **dict.fromkeys(("batch_size", "bs"), "batch="),
    **dict.fromkeys(
        ("causal", "is_causal"), "cost(masks.Causal(), seq_len), or mask=masks.Causal() beside a mechanism"
    ),
}


@answers(_WORDS, subject="a mask, as cost(masks.Causal(), 4096), a score, a mechanism, a layer, a model or a config")
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
    """Say what something computes, moves and holds, before it is run.

    Every operation is gone through with tensors that have shapes and no memory, and products of attention say what
    their kernel would do on this machine's processor: so it is as exact as what it goes through.

    Args:
        subject: a mask, a score or a mechanism (for tensors query, key and value); a layer; a model of saccade or of
            transformers, or any module with ``inputs``; or the config of an encoder or decoder, for a model that does
            not exist yet.
        seq_len: tokens.
        mask: who may attend to whom, beside a score, a mechanism, or a layer that takes one.
        batch: texts at once.
        num_heads, num_kv_heads, head_dim: of query, key and value; layers and models have their own.
        dtype: of all numbers; float32 when None, or what a module has.
        inputs: makes what the module is called with, of a length; only for modules that are called neither with tokens
            nor with vectors ``[batch, seq_len, embed_dim]``.
        optimizer_tensors: how many numbers the optimizer keeps for each weight: 2 for Adam, 0 for plain descent.

    Returns:
        A `Cost`.

    Raises:
        TypeError, ValueError: sizes that do not fit together, a subject that is none.
        UnsupportedError: what is run depends on what tensors hold, as with `saccade.mechanisms.TopK`.

    Cost: three dry runs, a second or two; of mechanisms that go chunk by chunk about a second for 4,000 tokens.

    Example:
        >>> from saccade import masks
        >>> told = cost(masks.sliding_window(256), 16384)
        >>> told.forward.flops < cost(masks.Causal(), 16384).forward.flops / 10
        True
        >>> told.fits(2 * 2**30, training=True)
        True
    """
    sizes = Sizes(
        batch=check_int("batch", batch, 1),
        num_heads=check_int("num_heads", num_heads, 1),
        num_kv_heads=num_heads if num_kv_heads is None else check_int("num_kv_heads", num_kv_heads, 1),
        head_dim=check_int("head_dim", head_dim, 1),
        dtype=torch.float32 if dtype is None else _checked(dtype),
    )
    if sizes.num_heads % sizes.num_kv_heads:
        raise value_error("num_kv_heads", f"divide num_heads={num_heads}", num_kv_heads)
    length = check_int("seq_len", seq_len, 1)
    states = check_int("optimizer_tensors", optimizer_tensors, 0)
    one = made(subject, mask, sizes, dtype, inputs)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        held = _cache_bytes(one, length)
        with mode:
            alone = one.without_memory()
            weights = sum(x.nbytes for x in held_tensors(alone.module))
        runs = forward(alone, mode, length), training(alone, mode, length, states)
        decode = None if held is None else decoding(alone, mode, length, held)
    except RuntimeError as error:
        if isinstance(error, DataDependentOutputException | DynamicOutputShapeException) or "meta tensors" in str(
            error
        ):
            raise refuse_dry(error) from error
        raise
    kinds = {x.dtype for x in alone.module.parameters() if x.is_floating_point()}
    return Cost(alone.name, length, batch, next(iter(kinds), sizes.dtype), weights, *runs, decode, held)


def _cache_bytes(subject: Subject, length: int) -> int | None:
    if not subject.decodes:
        return None
    subject.module.eval()
    with torch.no_grad():
        return subject.cache_bytes(length)


def _checked(dtype: object) -> torch.dtype:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise type_error("dtype", "be a dtype of floats", dtype, hint="torch.bfloat16")
    return dtype


def _memory() -> int:
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" not in names:
        raise value_error("memory", "be given, since this system does not say how much it has", None)
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
