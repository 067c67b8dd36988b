"""A broken claim of a model of transformers as lines that run without this library, and print one number.

It ought to be below 1e-5. The lines stand behind those that make ``model`` and ``ids``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from saccade.auditing.declared_rules import is_causal
from saccade.auditing.model_under_test import can_cache
from saccade.auditing.transformers_runner import TransformersRunner


class _Told(NamedTuple):
    """A claim of a model, and how the model is called."""

    claim: str
    model: nn.Module
    begin: str | None  # what is added to positions that are counted from 0; None where it takes none
    cache: str
    n: int
    lengths: tuple[int, ...]
    read: str

    @property
    def half(self) -> int:
        return self.n // 2


def run_lines(model: nn.Module, read: str) -> list[str]:
    """Two functions: one runs the model and reads its rows, by ``.logits`` for instance, and one compares rows."""
    more = '{"use_cache": False, **more}' if can_cache(model) else "more"
    return [
        f"run = lambda ids, **more: model(input_ids=ids, **{more}){read}",
        "off = lambda a, b: print(((a - b).abs().max() / b.square().mean().sqrt()).item())",
    ]


def claim_lines(
    claim: str, model: nn.Module, ids: Tensor, lengths: Sequence[int] = (), read: str = ".logits"
) -> list[str]:
    """Lines that run the model in two ways that ought to say the same; none where the claim is not of that kind.

    Args:
        claim: its name, as `saccade.auditing.equivalence` gives it.
        model: of transformers.
        ids: int ``[batch, len]``.
        lengths: of the texts that are packed.
        read: how rows are read of what the model returns.
    """
    runner = TransformersRunner(model)
    begin = None
    if "position_ids" in runner.parameters:
        with torch.no_grad():
            first = runner.begin(ids)
        begin = f" + {first}" if first else ""
    write = _WRITTEN.get(re.split(r"\W", claim, maxsplit=1)[0])
    told = _Told(claim, model, begin, runner.cache or "", ids.shape[1], tuple(lengths), read)
    return write(told) if write else []


def _batched(told: _Told) -> list[str]:
    return ["off(torch.cat([run(one) for one in ids.split(1)]), run(ids))"]


def _trained(told: _Told) -> list[str]:
    return [
        "want = run(ids)",
        "for part in (model.config, *model.train().modules()):",
        '    zero = {n: 0.0 for n, v in vars(part).items() if type(v) is float and ("drop" in n or n == "p")}',
        "    part.__dict__.update(zero)",
        "off(run(ids), want)",
    ]


def _shifted(told: _Told) -> list[str]:
    return [f"off(run(ids, position_ids=torch.arange(13, {13 + told.n}).expand(2, -1){told.begin}), run(ids))"]


def _padded(told: _Told) -> list[str]:
    wide, mask, real = ["ids", "0 * ids[:, :8]"], ["torch.ones_like(ids)", "0 * ids[:, :8]"], f":{told.n}"
    if told.claim.endswith("left"):
        wide, mask, real = wide[::-1], mask[::-1], "8:"
    places = "" if told.begin is None else f", position_ids=(mask.cumsum(1) - 1).clamp(min=0){told.begin}"
    return [
        f"wide, mask = torch.cat([{', '.join(wide)}], 1), torch.cat([{', '.join(mask)}], 1)",
        f"off(run(wide, attention_mask=mask{places})[:, {real}], run(ids))",
    ]


def _packed(told: _Told) -> list[str]:
    lines = [f"ids, places = ids[:1], torch.cat([torch.arange(n) for n in {told.lengths}])[None]{told.begin}"]
    more = ""
    if told.claim.endswith("a cache"):
        more = ", use_cache=True"
    elif told.claim.endswith("a mask of ones"):
        more = ", attention_mask=torch.ones_like(ids)"
    elif told.claim.endswith("dimensions"):
        more = ", attention_mask=mask"
        tril = ".tril()" if is_causal(told.model) else ""
        lines += [
            f"seen = torch.block_diag(*[torch.ones(n, n){tril} for n in {told.lengths}])[None, None]",
            "mask = torch.zeros_like(seen).masked_fill(seen == 0, torch.finfo(seen.dtype).min)",
        ]
    alone = f"torch.cat([run(one) for one in ids.split({list(told.lengths)}, 1)], 1)"
    return [*lines, f"off(run(ids, position_ids=places{more}), {alone})"]


def _stepped(told: _Told) -> list[str]:
    return [
        "state, rows = None, []",
        f"for piece in ids.tensor_split({_cuts(told)}, 1):",
        f'    out = model(input_ids=piece, use_cache=True, **({{}} if state is None else {{"{told.cache}": state}}))',
        f"    state, rows = out.{told.cache}, [*rows, out{told.read}]",
        "off(torch.cat(rows, 1), run(ids))",
    ]


def _cuts(told: _Told) -> str:
    """Where a text is cut, by the name of the claim."""
    if found := re.search(r"cut at (\d+)", told.claim):
        return f"[{found[1]}]"
    splits = {
        "one token first": "[1]",
        "one token last": f"[{told.n - 1}]",
        "two halves": f"[{told.half}]",
        "one by one": f"list(range(1, {told.n}))",
        "pieces of 5": f"list(range(5, {told.n}, 5))",
    }
    return splits[told.claim.removeprefix("steps: ")]


def _cached(told: _Told) -> list[str]:
    """Another text is read and taken back, or in a copy; rows are exchanged; and the text goes on as if nothing was."""
    first, other, rest = f"ids[:, :{told.half}]", f"ids.flip(1)[:, :{told.n - told.half}]", f"ids[:, {told.half}:]"
    lines = [
        f"more = lambda ids, state: model(input_ids=ids, use_cache=True, {told.cache}=state){told.read}",
        f"begun = lambda: model(input_ids={first}, use_cache=True).{told.cache}",
        "state = begun()",
    ]
    if told.claim == "cache reordered":
        return [
            *lines,
            "rows = torch.tensor([1, 0]); state.reorder_cache(rows)",
            f"off(more({rest}[rows], state), more({rest}, begun())[rows])",
        ]
    if told.claim == "cache cropped":
        lines.append('hasattr(state, "activate_past_recording") and state.activate_past_recording()')
        lines.append(f"_ = more({other}, state); state.crop(-{told.n - told.half})")
    else:
        lines.append(f"import copy; _ = more({other}, copy.deepcopy(state))")
    return [*lines, f"off(more({rest}, state), more({rest}, begun()))"]


_WRITTEN: dict[str, Callable[[_Told], list[str]]] = {
    "one": _batched,
    "in": _trained,
    "positions": _shifted,
    "padded": _padded,
    "packed": _packed,
    "steps": _stepped,
    "cache": _cached,
}
