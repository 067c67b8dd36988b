"""An encoder-decoder as a subject: one row of tokens, the source's and then the target's."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.auditing.finding import Finding
from saccade.auditing.model_under_test import Subject, depth_of, rows_of
from saccade.models import EncoderDecoder
from saccade.support.errors import value_error

_SOURCE, _TARGET = "input_ids", "decoder_input_ids"
_DEEP = 1 << 20  # more layers than any model has


def is_pair(model: object) -> bool:
    """Whether a model reads two texts: an encoder-decoder of transformers or ours."""
    if isinstance(model, EncoderDecoder):
        return True
    return isinstance(model, nn.Module) and _TARGET in inspect.signature(model.forward).parameters


class PairSubject(Subject):
    """An encoder-decoder, whose tokens are those of the source followed by those of the target.

    Args:
        model: of transformers, with ``get_encoder()``; or a `saccade.models.EncoderDecoder`.
        inputs: keyword arguments, among them token ids ``input_ids`` ``[batch, source_len]`` and ``decoder_input_ids``
            ``[batch, target_len]``.
        outputs: reads the target's rows of what the model returns; the source's are those of its encoder.
    """

    def _find(self) -> None:
        self.source, self.target = _two(self.inputs)
        named: Any = self.model
        encoder = named.get_encoder() if hasattr(named, "get_encoder") else getattr(named, "encoder", None)
        if not isinstance(encoder, nn.Module):
            rule = "have an encoder, or get_encoder(), since its forward takes decoder_input_ids"
            raise value_error("the model", rule, type(named).__name__)
        self.encoder = encoder
        self._prefix = next(name for name, own in named.named_modules() if own is self.encoder) + "."
        self.given = self.handed = self.source

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.source), self.source.shape[1] + self.target.shape[1]

    @property
    def parts(self) -> dict[str, slice]:
        start = self.source.shape[1]
        return {"source": slice(0, start), "target": slice(start, self.shape[1])}

    @property
    def depths(self) -> tuple[int, int]:
        """Layers of the encoder and of the decoder, by the numbers in the names of their modules."""
        found = {True: 1, False: 1}
        for name in self.modules:
            inside = name.startswith(self._prefix)
            if (depth := depth_of(name, _DEEP)) < _DEEP - 1:
                found[inside] = max(found[inside], depth + 1)
        return found[True], found[False]

    def layer_of(self, name: str, layers: int) -> int:
        encoder, decoder = self.depths
        return depth_of(name, encoder) if name.startswith(self._prefix) else encoder + depth_of(name, decoder)

    def part_of(self, name: str) -> slice:
        return self.parts["source" if name.startswith(self._prefix) else "target"]

    def read_from(self, hidden: Tensor) -> slice | None:
        is_source = hidden.shape == self.encoded.shape and torch.equal(hidden, self.encoded)
        return self.parts["source"] if is_source else None

    def told(self, finding: Finding) -> Finding:
        row, key = (None if at is None else self._own(at) for at in (finding.row, finding.key))
        assert row is not None
        nouns = (row[0], "token" if key is None else key[0])
        return dataclasses.replace(finding, row=row[1], key=None if key is None else key[1], nouns=nouns)

    def _own(self, at: tuple[int, int]) -> tuple[str, tuple[int, int]]:
        start = self.parts["target"].start
        return ("source", at) if at[1] < start else ("target", (at[0], at[1] - start))

    def _run(self, vectors: Tensor | None) -> Tensor:
        self.passes += 1
        left, kept = {"source": self.source, "target": self.target}, dict[str, Tensor]()

        def swap(module: nn.Module, arguments: tuple[Any, ...], out: Tensor) -> Tensor | None:
            ids = arguments[0] if arguments else None
            part = next((name for name, own in left.items() if isinstance(ids, Tensor) and torch.equal(ids, own)), None)
            if part is None:
                return None
            del left[part]
            kept[part] = out.detach().clone()
            return None if vectors is None else vectors[:, self.parts[part]].clone()  # some scale them in place

        def keep(module: nn.Module, arguments: tuple[Any, ...], out: Any) -> None:
            self.encoded = rows_of(out)

        model: Any = self.model
        tables = [own for own in model.modules() if isinstance(own, nn.Embedding)]
        handles = [own.register_forward_hook(swap) for own in tables]
        handles.append(self.encoder.register_forward_hook(keep))
        try:
            target = self.outputs(self._called(self.given))
        finally:
            for handle in handles:
                handle.remove()
        if left or kept["source"].shape[2:] != kept["target"].shape[2:]:
            rule = "look both texts up in a torch.nn.Embedding, for vectors of one width"
            got = f"no table asked for the {next(iter(left))}" if left else [list(one.shape) for one in kept.values()]
            raise value_error("the model", rule, got)
        if not hasattr(self, "vectors"):  # later ones may be moved by a unit
            self.vectors = torch.cat([kept["source"], kept["target"]], 1)
        return _joined(self.encoded, target)

    def _called(self, given: Tensor) -> Any:
        assert isinstance(self.inputs, Mapping)  # or _two had raised
        if isinstance(self.model, EncoderDecoder):
            more = {name: one for name, one in self.inputs.items() if name not in (_SOURCE, _TARGET)}
            return self.model(self.source, self.target, **more)
        return self.model(**self.inputs)


def _two(inputs: object) -> tuple[Tensor, Tensor]:
    found = [inputs.get(name) if isinstance(inputs, Mapping) else None for name in (_SOURCE, _TARGET)]
    source, target = found
    if not (isinstance(source, Tensor) and isinstance(target, Tensor) and source.dim() == target.dim() == 2):
        rule = f"have token ids {_SOURCE} and {_TARGET}, [batch, length], for an encoder-decoder"
        raise value_error("inputs", rule, sorted(inputs) if isinstance(inputs, Mapping) else inputs)
    if len(source) != len(target):
        rule = f"have as many texts in {_TARGET} as in {_SOURCE}, {len(source)}"
        raise value_error("inputs", rule, len(target))
    return source, target


def _joined(source: Tensor, target: Tensor) -> Tensor:
    """Rows of both texts; the narrower ones are followed by zeros."""
    both = [rows.reshape(*rows.shape[:2], -1) for rows in (source, target)]
    width = max(rows.shape[-1] for rows in both)
    return torch.cat([F.pad(rows, (0, width - rows.shape[-1])) for rows in both], 1)
