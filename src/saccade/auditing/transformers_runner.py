"""Run transformers models in every way that the parameters of their ``forward`` support."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from saccade.auditing.declared_rules import is_causal
from saccade.auditing.model_under_test import can_cache
from saccade.auditing.rounding_noise import relative
from saccade.auditing.runner import Beside, Runner, Side, Unanswered, WrongArgument, without_dropout
from saccade.integrations.transformers import install
from saccade.masks import Documents
from saccade.support.errors import value_error
from saccade.support.language import Message


class TransformersRunner(Runner):
    """A runner for transformers models. It passes ``input_ids`` and other arguments to the model's ``forward``."""

    _RELATIVE: ClassVar = ("default", "linear", "llama3", "yarn")  # RoPE types that do not depend on the length

    @property
    def window(self) -> int | None:
        size = getattr(self._text_config, "sliding_window", None)
        return size if isinstance(size, int) else None

    @property
    def vocab_size(self) -> int | None:
        size = getattr(self._text_config, "vocab_size", None)
        return size if isinstance(size, int) else None

    def whole(self, ids: Tensor) -> Tensor:
        return self._run(ids)

    def shifted(self, ids: Tensor, by: int) -> Tensor:
        self._need("position_ids")
        rope = getattr(self._text_config, "rope_parameters", None) or {}
        each = [one for one in rope.values() if isinstance(one, dict)] or [rope]
        if not all(one.get("rope_type") in self._RELATIVE for one in each):
            raise Unanswered("its config does not show that positions are relative")
        return self._run(
            ids, position_ids=self._position_ids(ids, torch.arange(by, by + ids.shape[1])).expand(ids.shape)
        )

    def padded(self, ids: Tensor, side: Side, pad: int) -> Tensor:
        self._need("attention_mask")
        batch, n = ids.shape
        fill = getattr(self._text_config, "pad_token_id", None)
        extra = ids.new_full((batch, pad), fill if isinstance(fill, int) else 0)
        real, none = torch.ones_like(ids), torch.zeros_like(extra)
        wide = torch.cat([extra, ids] if side == "left" else [ids, extra], 1)
        mask = torch.cat([none, real] if side == "left" else [real, none], 1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        more: dict[str, Any] = (
            {"position_ids": self._position_ids(ids, positions)} if self._takes("position_ids") else {}
        )
        rows = self._run(wide, attention_mask=mask, **more)
        return rows[:, pad:] if side == "left" else rows[:, :n]

    def packed(self, ids: Tensor, lengths: Sequence[int], *, beside: Beside = "positions") -> Tensor:
        self._need("position_ids")
        positions = self._position_ids(ids, torch.cat([torch.arange(length) for length in lengths])[None])
        if beside == "positions":
            return self._run(ids, position_ids=positions)
        if beside == "a cache":
            if not can_cache(self.model):
                raise Unanswered("its forward takes no use_cache")
            return self._run(ids, position_ids=positions, cached=True)
        self._need("attention_mask")
        mask = torch.ones_like(ids) if beside == "a mask of ones" else self._four_dimensions(lengths).to(ids.device)
        return self._run(ids, position_ids=positions, attention_mask=mask)

    def packed_inputs(self, ids: Tensor, lengths: Sequence[int]) -> tuple[dict[str, Any], str]:
        self._need("position_ids")
        positions = self._position_ids(ids, torch.cat([torch.arange(length) for length in lengths])[None])
        inputs = {"input_ids": ids, "position_ids": positions} | ({"use_cache": False} if can_cache(self.model) else {})
        label = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(torch.tensor(lengths))[None]
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        boundaries: dict[str, Any] = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), ends.to(ids.device))
        boundaries |= dict.fromkeys(("max_length_q", "max_length_k"), max(lengths))
        packing_arguments = {
            "seq_idx, cu_seq_lens": boundaries | {"seq_idx": label.to(ids.device)},
            "cu_seq_lens": boundaries,
        }
        for names, more in packing_arguments.items():  # as transformers' collators pass; some models reject them
            try:
                with torch.no_grad():
                    self.model(**inputs, **more)
            except Exception:  # a model may raise any error
                continue
            return inputs | more, f"position_ids, {names}"
        return inputs, "position_ids"

    def start(self) -> Any:
        if self.cache is None:
            raise Unanswered("its forward takes no cache")

    def more(self, ids: Tensor, state: Any) -> tuple[Tensor, Any]:
        name = self.cache or ""
        out = self.model(input_ids=ids, use_cache=True, **({} if state is None else {name: state}))
        state = getattr(out, name, None)
        if state is None:
            raise Unanswered("it returns no cache")
        return self._rows(out, ids), state

    def rewindable(self, state: Any) -> Any:
        if hasattr(state, "activate_past_recording"):
            state.activate_past_recording()
        return state

    def cropped(self, state: Any, tokens: int) -> Any:
        if not getattr(state, "is_croppable", True):  # recurrent states, whose crop raises no error
            raise Unanswered("its cache is not croppable")
        state.crop(-tokens)
        return state

    def reordered(self, state: Any, rows: Tensor) -> Any:
        state.reorder_cache(rows)
        return state

    def trained(self) -> Self:
        other = super().trained()
        for config in (other._config, other._text_config):
            without_dropout(config)
        return other

    def checkpointed(self) -> Self:
        other = self.trained()
        if not getattr(other._model, "supports_gradient_checkpointing", False):
            raise Unanswered("it does not support gradient checkpointing")
        other._model.gradient_checkpointing_enable({"use_reentrant": False})
        return other

    def filling_cache(self, ids: Tensor) -> Tensor:
        if not can_cache(self.model):
            raise Unanswered("its forward takes no use_cache")
        return self._run(ids, cached=True)

    def stretched(self, ids: Tensor, by: int, axis: int | None = None) -> Tensor:
        self._need("position_ids")
        positions = self._position_ids(ids, torch.arange(ids.shape[1]))
        if axis is None:
            return self._run(ids, position_ids=(positions * by).expand(ids.shape))
        axes = positions.expand(self._axes, *ids.shape).clone()
        axes[axis] *= by
        return self._run(ids, position_ids=axes)

    def on_axes(self, ids: Tensor) -> Tensor:
        self._need("position_ids")
        positions = self._position_ids(ids, torch.arange(ids.shape[1]))
        return self._run(ids, position_ids=positions.expand(self._axes, *ids.shape))

    @property
    def _axes(self) -> int:
        sections = (getattr(self._text_config, "rope_parameters", None) or {}).get("mrope_section")
        if not sections:
            raise Unanswered("its positions have a single axis")
        return len(sections)

    @property
    def has_positions(self) -> bool:
        """Whether the model has a module whose name suggests positions, or a configuration of rotary embeddings."""
        named = any(re.search(r"rot|rope|pos|wpe", name.lower()) for name, _ in self.model.named_modules())
        return named or bool(getattr(self._text_config, "rope_parameters", None))

    def implemented(self, name: str) -> Self:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: PLC0415  # transformers is an extra

        name = "flex_attention" if name == "flex" else name
        if name == "saccade":
            install()
        known = sorted({"eager", "saccade", *ALL_ATTENTION_FUNCTIONS.valid_keys()})
        if name not in known:
            raise WrongArgument(str(value_error("against", f"be among {', '.join(known)}", repr(name))))
        if self._config._attn_implementation == name:
            raise Unanswered(Message("the model already uses {name}", name=name))
        other = self.on(copy.deepcopy(self.model))
        other._model.set_attn_implementation(name)
        if other._config._attn_implementation != name:
            raise Unanswered("its implementation of attention cannot be changed")
        return other

    def ours(self, lengths: Sequence[int]) -> Self:
        return self.implemented(install("saccade-audit", mask=Documents(lengths)))

    @property
    def _text_config(self) -> Any:
        return self._config.get_text_config()

    @property
    def _config(self) -> Any:
        return self._model.config

    @property
    def _model(self) -> Any:  # no type: it has more attributes than nn.Module, and transformers may not be installed
        return self.model

    @property
    def cache(self) -> str | None:
        """The name of the parameter of the model's ``forward`` that takes a cache; None if no parameter does."""
        return next((name for name in ("past_key_values", "cache_params", "cache") if self._takes(name)), None)

    @property
    def parameters(self) -> Collection[str]:
        """The names of the parameters of the model's ``forward``."""
        return inspect.signature(self.model.forward).parameters.keys()

    def _position_ids(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Convert positions that start at 0 to the model's position ids, which may start elsewhere."""
        return positions.to(ids.device) + self.begin(ids)

    def begin(self, ids: Tensor) -> int:
        """Return the model's first position id. For RoBERTa, this is one more than the padding id.

        With position ids that start at this id, the model gives the same result as without position ids.
        """
        own, text = self._run(ids), torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        padding_id = getattr(self._text_config, "pad_token_id", None)
        limit = getattr(self._text_config, "max_position_embeddings", None) or ids.shape[1]
        others = {2, padding_id + 1 if isinstance(padding_id, int) else 1}
        begins = [0, *(begin for begin in sorted(others) if begin + ids.shape[1] <= limit)]
        return min(begins, key=lambda begin: relative(self._run(ids, position_ids=text + begin), own))

    def _four_dimensions(self, lengths: Sequence[int]) -> Tensor:
        """Return an additive mask with four dimensions that separates packed texts.

        It is 0 for allowed pairs (both in one text, and no later key in a causal model) and the lowest float for all
        other pairs.
        """
        allowed = torch.block_diag(*[torch.ones(length, length) for length in lengths])
        allowed = (allowed.tril() if is_causal(self._model) else allowed).bool()[None, None]
        dtype = next(self.model.parameters()).dtype
        return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)

    def _takes(self, name: str) -> bool:
        return name in self.parameters

    def _need(self, name: str) -> None:
        if not self._takes(name):
            raise Unanswered(Message("its forward takes no {name}", name=name))

    def _run(self, ids: Tensor, *, cached: bool = False, **more: Any) -> Tensor:
        flag = {"use_cache": cached} if can_cache(self.model) else {}
        return self._rows(self.model(input_ids=ids, **flag, **more), ids)
