"""`Declaration`: what a kernel claims to compute, in Python or in a TOML file, and the failures that it expects."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saccade.support.errors import type_error, value_error
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
    """The claims of a kernel. All that it does not claim is refused on its behalf and reported as not offered.

    Attributes:
        form: the form of its arguments, a name of `saccade.testing.adapters.FORMS`.
        settings: arguments of the adapter of that form.
        dtypes: names of the dtypes; None for float64 and float32 and whatever laws bring.
        masks: kinds of masks besides none at all: "causal", "window", "padding", "documents", which may come together,
            or "any"; None for any.
        widths, value_widths: head widths; None for any. ``value_widths="same"`` means those of the keys.
        lengths: ``min``, ``max`` and ``multiple`` of q_len and kv_len.
        decoding: whether there may be more keys than queries, and the reverse.
        groups: whether several query heads may share key heads.
        gradients: whether it has a backward pass.
        empty: whether lengths may be 0.
        options: options that it takes, such as "scale" and "bias"; None reads them from the adapter or the signature.
        with_lse: the name, beside the kernel's, of the same function returning ``(out, lse)``; for the plain form
            alone, ``(query, key, value, mask)`` in the layout ``[batch, heads, len, dim]``.
        mask_objects: whether it takes masks as `saccade.masks.Mask`, and positions; for the plain form alone.
        memory_exponent: its largest tensor grows as length to this power; None claims nothing.
        xfail: reasons by law, ``law[case]`` or ``law[case-dtype]``, with ``*`` for any text: what is known to fail.
    """

    form: str = "layout"
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dtypes: tuple[str, ...] | None = None
    masks: tuple[str, ...] | None = None
    widths: tuple[int, ...] | None = None
    value_widths: tuple[int, ...] | str | None = None
    lengths: Mapping[str, int] = dataclasses.field(default_factory=dict)
    decoding: bool = True
    groups: bool = True
    gradients: bool = True
    empty: bool = True
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
        is_plain = self.form == "layout" and not set(self.settings) - {"names", "offers"}
        if (self.with_lse or self.mask_objects) and not is_plain:
            raise value_error("with_lse and mask_objects", "come with the plain form", self.form)
        if self.mask_objects and self.masks is not None:
            raise value_error("masks", "be left out with mask_objects", ", ".join(self.masks))
        for pattern, reason in self.xfail.items():
            if not isinstance(reason, str) or not reason.strip():
                raise value_error("xfail", "give a reason for each entry", f"{pattern} = {reason!r}")

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Declaration:
        """Return the declaration of a table of fields, as in a TOML file.

        Raises:
            ValueError: a field or a value is unknown.
        """
        names = tuple(field.name for field in dataclasses.fields(cls))
        if not isinstance(fields, Mapping):
            raise type_error("claims", "be a table of claims", type(fields).__name__)
        _check_names("claims", tuple(fields), names)
        told: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in fields.items()}
        return cls(**told)

    @classmethod
    def read(cls, path: Path) -> Declaration:
        """Return the declaration of a TOML file.

        Raises:
            ValueError: it is no TOML, or a field or a value is unknown.
            OSError: it cannot be read.
        """
        try:
            return cls.of(tomllib.loads(path.read_text(encoding="utf-8")))
        except tomllib.TOMLDecodeError as error:
            raise value_error("claims", "be TOML", f"{path} ({error})") from None

    def reasons(self, query: Tensor, key: Tensor, value: Tensor, mask: Any) -> tuple[str, ...]:
        """Return why the claims exclude the inputs of a call; empty if they do not."""
        reasons = list(self._sizes(query, key, value))
        if self.dtypes is not None and query.dtype not in {DTYPES[name] for name in self.dtypes}:
            reasons.append(f"claims {' and '.join(self.dtypes)} alone")
        if not self.gradients and torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
            reasons.append("claims no gradients")
        if self.masks is not None and "any" not in self.masks and (kinds_of(mask) or {"any"}) - {*self.masks, "none"}:
            reasons.append(f"claims {' and '.join(self.masks)} masks alone" if self.masks else "claims no masks")
        return tuple(reasons)

    def _sizes(self, query: Tensor, key: Tensor, value: Tensor) -> list[str]:
        """Return why the claims exclude the shapes of a call."""
        reasons, (q_len, kv_len) = [], (query.shape[2], key.shape[2])
        width, value_width = query.shape[3], value.shape[3]
        if self.widths is not None and width not in self.widths:
            reasons.append(f"claims widths {', '.join(map(str, self.widths))} alone")
        if self.value_widths == "same" and value_width != width:
            reasons.append("claims values as wide as keys alone")
        if isinstance(self.value_widths, tuple) and value_width not in self.value_widths:
            reasons.append(f"claims widths of values {', '.join(map(str, self.value_widths))} alone")
        least, most = self.lengths.get("min", 0), self.lengths.get("max")
        for length in {q_len, kv_len}:
            if length < least or (most is not None and length > most) or length % self.lengths.get("multiple", 1):
                reasons.append("claims lengths " + ", ".join(f"{name} {x}" for name, x in self.lengths.items()))
                break
        if not self.empty and 0 in (*query.shape[:3], kv_len):
            reasons.append("claims no empty inputs")
        if not self.decoding and q_len != kv_len:
            reasons.append("claims as many queries as keys alone")
        return reasons


def read_claims(text: str | None, more: Sequence[str] = ()) -> Declaration:
    """Return the declaration of a TOML file, or of ``file.py::NAME``, changed by single claims ``KEY=VALUE`` in TOML.

    Raises:
        ValueError: a file, a field or a value is not as it must be.
        OSError: a file cannot be read.
    """
    declaration = Declaration()
    if text is not None and "::" in text:
        found = Source.parse(text).load()
        declaration = found if isinstance(found, Declaration) else Declaration.of(found)
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
    """Return the kinds of a dense mask as in `Declaration.masks`, {"none"} if all is seen; None for any other."""
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
    if any(len(found) > 1 for found in documents):
        kinds |= {"documents"}
    covered = [sum(last - first for first, last, _, _ in found) for found in documents]
    return kinds | ({"padding"} if any(count < items.shape[1] for count in covered) else set())


def _kinds_of_band(band: tuple[int, int]) -> set[str]:
    kinds = {"causal"} if band[1] == 0 else set()
    return kinds | ({"window"} if band[0] > 0 or band[1] > 0 or band == (0, 0) else set())


def _check_names(argument: str, names: object, known: tuple[str, ...]) -> None:
    """Raise unless every name of a claim is known."""
    for name in names if isinstance(names, tuple) else ():
        if name not in known:
            raise value_error(argument, f"be among {', '.join(known)}", repr(name))
