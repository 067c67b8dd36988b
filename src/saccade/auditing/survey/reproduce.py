"""A broken claim as some lines that run without this library, and print one number that ought to be below 1e-5."""

from __future__ import annotations

import contextlib
import io
import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from saccade.auditing.declared import is_causal
from saccade.auditing.subject import can_cache
from saccade.auditing.survey.architectures import Architecture
from saccade.auditing.survey.small import VOCABULARY
from saccade.auditing.transformers_runner import TransformersRunner

__all__ = ["LENGTHS", "claim_lines", "ids", "model_lines", "printed", "reach_lines"]

LENGTHS = (9, 8, 7)
"""Of the texts that are packed: the first is longer than the small models' windows of 8."""

_N, _HALF = sum(LENGTHS), sum(LENGTHS) // 2


def ids() -> Tensor:
    """Two texts of 24 random tokens, none of them special."""
    return torch.randint(4, VOCABULARY, (2, _N), generator=torch.Generator().manual_seed(1))


def model_lines(architecture: Architecture, implementation: str, model: nn.Module) -> list[str]:
    """Lines that make the model and two texts, and two functions: one runs the model, one compares."""
    more = '{"use_cache": False, **more}' if can_cache(model) else "more"
    return [
        "import torch, transformers as T",
        "torch.manual_seed(0); torch.set_grad_enabled(False)",
        f"model = {architecture.expression()}.eval()",
        "[torch.nn.init.xavier_normal_(p) for p in model.parameters() if p.dim() > 1 and p.requires_grad]",
        *([f'model.set_attn_implementation("{implementation}")'] if implementation != "eager" else []),
        f"ids = torch.randint(4, {VOCABULARY}, (2, {_N}))",
        f"run = lambda ids, **more: model(input_ids=ids, **{more}).logits",
        "off = lambda a, b: print(((a - b).abs().max() / b.square().mean().sqrt()).item())",
    ]


class _Told(NamedTuple):
    """A claim of a model, and how the model is called."""

    claim: str
    model: nn.Module
    begin: str | None  # what is added to positions that are counted from 0; None where it takes none
    cache: str


def claim_lines(claim: str, model: nn.Module) -> list[str]:
    """Lines that run the model in two ways that ought to say the same; none where the claim is not of that kind."""
    runner = TransformersRunner(model)
    begin = None
    if "position_ids" in runner.parameters:
        with torch.no_grad():
            first = runner.begin(ids())
        begin = f" + {first}" if first else ""
    write = _WRITTEN.get(re.split(r"\W", claim, maxsplit=1)[0])
    return write(_Told(claim, model, begin, runner.cache or "")) if write else []


def reach_lines(row: tuple[int, int], key: tuple[int, int]) -> list[str]:
    """Lines that put another token in one place and look at an output that must not depend on it."""
    return [
        f"other = ids.clone(); other[{key[0]}, {key[1]}] = 3",
        f"off(run(other)[{row[0]}, {row[1]}], run(ids)[{row[0]}, {row[1]}])",
    ]


def printed(lines: Sequence[str]) -> float:
    """The number that a script prints; NaN where it raises."""
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), torch.no_grad():
            exec("\n".join(lines), {})  # text of this module's own
        return float(out.getvalue())
    except Exception:  # whatever so many models may raise: then nothing is reproduced
        return math.nan


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
    return [f"off(run(ids, position_ids=torch.arange(13, {13 + _N}).expand(2, -1){told.begin}), run(ids))"]


def _padded(told: _Told) -> list[str]:
    wide, mask, real = ["ids", "0 * ids[:, :8]"], ["torch.ones_like(ids)", "0 * ids[:, :8]"], f":{_N}"
    if told.claim.endswith("left"):
        wide, mask, real = wide[::-1], mask[::-1], "8:"
    places = "" if told.begin is None else f", position_ids=(mask.cumsum(1) - 1).clamp(min=0){told.begin}"
    return [
        f"wide, mask = torch.cat([{', '.join(wide)}], 1), torch.cat([{', '.join(mask)}], 1)",
        f"off(run(wide, attention_mask=mask{places})[:, {real}], run(ids))",
    ]


def _packed(told: _Told) -> list[str]:
    lines = [f"ids, places = ids[:1], torch.cat([torch.arange(n) for n in {LENGTHS}])[None]{told.begin}"]
    more = ""
    if told.claim.endswith("a cache"):
        more = ", use_cache=True"
    elif told.claim.endswith("a mask of ones"):
        more = ", attention_mask=torch.ones_like(ids)"
    elif told.claim.endswith("dimensions"):
        more = ", attention_mask=mask"
        tril = ".tril()" if is_causal(told.model) else ""
        lines += [
            f"seen = torch.block_diag(*[torch.ones(n, n){tril} for n in {LENGTHS}])[None, None]",
            "mask = torch.zeros_like(seen).masked_fill(seen == 0, torch.finfo(seen.dtype).min)",
        ]
    alone = f"torch.cat([run(one) for one in ids.split({list(LENGTHS)}, 1)], 1)"
    return [*lines, f"off(run(ids, position_ids=places{more}), {alone})"]


def _stepped(told: _Told) -> list[str]:
    return [
        "state, rows = None, []",
        f"for piece in ids.tensor_split({_cuts(told.claim)}, 1):",
        f'    out = model(input_ids=piece, use_cache=True, **({{}} if state is None else {{"{told.cache}": state}}))',
        f"    state, rows = out.{told.cache}, [*rows, out.logits]",
        "off(torch.cat(rows, 1), run(ids))",
    ]


def _cuts(claim: str) -> str:
    """Where a text is cut, by the name of the claim."""
    if found := re.search(r"cut at (\d+)", claim):
        return f"[{found[1]}]"
    splits = {
        "one token first": "[1]",
        "one token last": f"[{_N - 1}]",
        "two halves": f"[{_HALF}]",
        "one by one": f"list(range(1, {_N}))",
        "pieces of 5": f"list(range(5, {_N}, 5))",
    }
    return splits[claim.removeprefix("steps: ")]


def _cached(told: _Told) -> list[str]:
    """Another text is read and taken back, or in a copy; rows are exchanged; and the text goes on as if nothing was."""
    first, other, rest = f"ids[:, :{_HALF}]", f"ids.flip(1)[:, :{_N - _HALF}]", f"ids[:, {_HALF}:]"
    lines = [
        f"more = lambda ids, state: model(input_ids=ids, use_cache=True, {told.cache}=state).logits",
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
        lines.append(f"_ = more({other}, state); state.crop(-{_N - _HALF})")
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
