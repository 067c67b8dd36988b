"""`Declaration`: what a kernel claims to support, and its expected failures, in Python or in a TOML file."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saccade.support.errors import type_error, value_error
from saccade.support.language import Message, joined
from saccade.support.validation import check_choice
from saccade.testing.adapters import FORMS
from saccade.testing.adapters.paged import lengths_of
from saccade.testing.adapters.patterns import band_of, band_of_blocks, blocks_of, of_items, one_mask
from saccade.testing.judging.source import Source
from saccade.testing.kernel_under_test import OPTIONS

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MASKS = ("causal", "window", "padding", "documents", "any")
_LENGTHS = ("min", "max", "multiple")


@dataclasses.dataclass(frozen=True)
class Declaration:
    """The claims of a kernel. Inputs that they do not include are refused, and reported as not offered.

    A field that is None or empty makes no statement: `judge` then tries one small call, and treats the capability as
    not claimed if the call raises an error.

    Attributes:
        form: the calling convention, a name in `saccade.testing.adapters.FORMS`.
        settings: arguments of the adapter for this form.
        dtypes: names of the supported dtypes. When None, float64, float32 and the dtypes that laws define are tested.
        masks: the supported kinds of masks, in addition to no mask: "causal", "window", "padding", "documents" and
            their combinations, or "any".
        full: whether the kernel supports full attention, where every query attends to every key.
        widths, value_widths: the supported head widths, or "any". ``value_widths="same"`` means the width of the keys.
        lengths: ``min``, ``max`` and ``multiple`` of the supported q_len and kv_len.
        decoding: whether the numbers of queries and keys may differ.
        groups: whether several query heads may share a key head.
        gradients: whether the kernel has a backward pass.
        empty: whether lengths may be 0.
        non_finite: whether the laws on NaN and inf are tried.
        options: the supported options, such as "scale" and "bias"; if None, they are read from the adapter or the
            signature.
        with_lse: name of a variant that returns ``(out, lse)``, in the same file or module. It requires the plain form,
            ``(query, key, value, mask)`` in the layout ``[batch, heads, len, dim]``.
        mask_objects: whether the kernel takes masks as `saccade.masks.Mask`, and positions. It requires the plain form.
        memory_exponent: the size of the largest tensor grows as the length to this power; if None, nothing is claimed.
        xfail: reasons for expected failures, by ``law``, ``law[case]`` or ``law[case-dtype]``, where ``*`` matches any
            text.
    """

    form: str = "layout"
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dtypes: tuple[str, ...] | None = None
    masks: tuple[str, ...] | None = None
    full: bool | None = None
    widths: tuple[int, ...] | str | None = None
    value_widths: tuple[int, ...] | str | None = None
    lengths: Mapping[str, int] = dataclasses.field(default_factory=dict)
    decoding: bool | None = None
    groups: bool | None = None
    gradients: bool | None = None
    empty: bool | None = None
    non_finite: bool = True
    options: tuple[str, ...] | None = None
    with_lse: str | None = None
    mask_objects: bool = False
    memory_exponent: float | None = None
    xfail: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("form", self.form, tuple(FORMS))
        _check_names("dtypes", self.dtypes, tuple(DTYPES))
        _check_names("masks", self.masks, MASKS)
        _check_names("options", self.options, OPTIONS)
        _check_names("lengths", tuple(self.lengths), _LENGTHS)
        for name, words in (("widths", ("any",)), ("value_widths", ("any", "same"))):
            if isinstance(getattr(self, name), str):
                check_choice(name, getattr(self, name), words)
        is_plain = self.form == "layout" and not set(self.settings) - {"names", "offers"}
        if (self.with_lse or self.mask_objects) and not is_plain:
            raise value_error(
                "with_lse and mask_objects", "be left out for forms other than the plain layout", self.form
            )
        if self.mask_objects and self.masks is not None:
            raise value_error("masks", "be left out if mask_objects is given", ", ".join(self.masks))
        for pattern, reason in self.xfail.items():
            if not isinstance(reason, str) or not reason.strip():
                raise value_error("xfail", "give a reason for each entry", f"{pattern} = {reason!r}")

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Declaration:
        """Build a declaration from a table of fields, as in a TOML file.

        Raises:
            ValueError: a field or a value is unknown.
        """
        names = tuple(field.name for field in dataclasses.fields(cls))
        if not isinstance(fields, Mapping):
            raise type_error("claims", "be a table of claims", type(fields).__name__)
        _check_names("claims", tuple(fields), names)
        claims: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()}
        return cls(**claims)

    @classmethod
    def read(cls, path: Path) -> Declaration:
        """Read a declaration from a TOML file.

        Raises:
            ValueError: the file is not TOML, or a field or a value is unknown.
            OSError: the file cannot be read.
        """
        try:
            return cls.of(tomllib.loads(path.read_text(encoding="utf-8")))
        except tomllib.TOMLDecodeError as error:
            raise value_error("claims", "be TOML", f"{path} ({error})") from None

    def reasons(self, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> tuple[str, ...]:
        """Return the reasons why the claims exclude the inputs of a call; empty if they do not."""
        reasons = list(self._sizes(query, key, value))
        if self.dtypes is not None and query.dtype not in {DTYPES[name] for name in self.dtypes}:
            reasons.append(Message("claims only {names}", names=listed(self.dtypes)))
        if self.gradients is False and torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
            reasons.append("claims no gradients")
        if self.full is False and query.shape[2] > 1 and bool(mask.all()):
            reasons.append("claims no full attention")
        if self.masks is not None and "any" not in self.masks and (kinds_of(mask) or {"any"}) - {*self.masks, "none"}:
            reasons.append(
                Message("claims only {names} masks", names=listed(self.masks)) if self.masks else "claims no masks"
            )
        return tuple(reasons)

    def _sizes(self, query: Tensor, key: Tensor, value: Tensor) -> list[str]:
        """Return the reasons why the claims exclude the shapes of a call's inputs; empty if they do not."""
        reasons: list[str] = []
        q_len, kv_len = query.shape[2], key.shape[2]
        width, value_width = query.shape[3], value.shape[3]
        if isinstance(self.widths, tuple) and width not in self.widths:
            reasons.append(Message("claims only widths {widths}", widths=", ".join(map(str, self.widths))))
        if self.value_widths == "same" and value_width != width:
            reasons.append("claims only values as wide as keys")
        if isinstance(self.value_widths, tuple) and value_width not in self.value_widths:
            reasons.append(Message("claims only value widths {widths}", widths=", ".join(map(str, self.value_widths))))
        least, most = self.lengths.get("min", 0), self.lengths.get("max")
        for length in {q_len, kv_len}:
            if length < least or (most is not None and length > most) or length % self.lengths.get("multiple", 1):
                reasons.append(
                    Message(
                        "claims lengths {names}", names=", ".join(f"{name} {x}" for name, x in self.lengths.items())
                    )
                )
                break
        if self.empty is False and 0 in (*query.shape[:3], kv_len):
            reasons.append("claims no empty inputs")
        if self.decoding is False and q_len != kv_len:
            reasons.append("claims only as many queries as keys")
        return reasons


def read_claims(text: str | None, more: Sequence[str] = ()) -> Declaration:
    """Read a declaration from a TOML file or ``file.py::NAME``, and override claims with lines ``KEY=VALUE`` in TOML.

    Raises:
        ValueError: a file, a field or a value is invalid.
        OSError: a file cannot be read.
    """
    declaration = Declaration()
    if text is not None and "::" in text:
        loaded = Source.parse(text).load()
        declaration = loaded if isinstance(loaded, Declaration) else Declaration.of(loaded)
    elif text is not None:
        declaration = Declaration.read(Path(text))
    fields: dict[str, Any] = {}
    for line in more:
        try:
            fields |= tomllib.loads(line)
        except tomllib.TOMLDecodeError:
            raise value_error("--claim", 'be KEY=VALUE in TOML, as in widths=[64] or form="varlen"', line) from None
    return Declaration.of(vars(declaration) | fields)


def kinds_of(mask: Tensor) -> set[str] | None:
    """Return the kinds of a dense mask, named as in `Declaration.masks`.

    The result is {"none"} if nothing is masked, and None if the mask has no known kind.
    """
    if bool(mask.all()):
        return {"none"}
    whole = one_mask(mask)
    band = None if whole is None else band_of(whole)
    if band is not None:
        return _kinds_of_band(band)
    lengths = lengths_of(mask) if mask.numel() else None
    if lengths is not None:
        return {"padding", *(("causal",) if lengths[1] else ())}
    items = of_items(mask)
    documents = [] if items is None else [blocks_of(item) for item in items]
    band = None if items is None else band_of_blocks(items, documents)
    if items is None or band is None:
        return None
    kinds = _kinds_of_band(band)
    if any(len(blocks) > 1 for blocks in documents):
        kinds |= {"documents"}
    covered = [sum(last - first for first, last, _, _ in blocks) for blocks in documents]
    return kinds | ({"padding"} if any(count < items.shape[1] for count in covered) else set())


def _kinds_of_band(band: tuple[int, int]) -> set[str]:
    kinds = {"causal"} if band[1] == 0 else set()
    return kinds | ({"window"} if band[0] > 0 or band[1] > 0 or band == (0, 0) else set())


def _check_names(argument: str, names: object, known: tuple[str, ...]) -> None:
    """Raise an error if a claim contains an unknown name."""
    for name in names if isinstance(names, tuple) else ():
        if name not in known:
            raise value_error(argument, f"be among {', '.join(known)}", repr(name))


def listed(names: Iterable[str]) -> Message:
    """Join names with "and"; the names themselves are never translated."""
    return joined((Message("{name}", name=name) for name in names), "{first} and {others}")
