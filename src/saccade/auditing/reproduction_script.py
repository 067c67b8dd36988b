"""Write short scripts for bug reports that demonstrate broken claims without this library.

Each script prints one number; it is below 1e-5 for a correct model.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from saccade.auditing.declared_rules import is_causal
from saccade.auditing.finding import ClaimResult, CounterExample
from saccade.auditing.model_under_test import can_cache
from saccade.auditing.transformers_runner import TransformersRunner

_LARGEST = 1e-5  # the largest number that a script prints for a correct model
_LARGEST_MODEL = 10**8  # number of weights of the largest model whose script is run, since the script builds another


def script_of(
    model: object,
    inputs: Tensor | Mapping[str, Any],
    ids: Tensor,
    claims: Sequence[ClaimResult],
    lengths: Sequence[int],
    seed: int,
) -> str:
    """Return a script for a bug report that shows the first broken claim; empty if no script can show a broken claim.

    Args:
        model: the audited model.
        inputs: the inputs of the model.
        ids: the token ids in these inputs.
        claims: the results of the claims.
        lengths: lengths of packed texts.
        seed: seed of random weights.
    """
    leaks = [claim.finding for claim in claims if claim.finding is not None and claim.finding.kind == "leak"]
    ways = [claim.name for claim in claims if claim.finding is not None and claim.finding.kind == "differs"]
    written = chain(
        (script_of_leak(model, inputs, leak, seed) for leak in leaks),
        (script_of_pair(model, ids, name, lengths, seed) for name in ways),
    )
    script = next(filter(None, written), "")
    is_small = isinstance(model, nn.Module) and sum(x.numel() for x in model.parameters()) <= _LARGEST_MODEL
    return _NOTE + script if script and is_small and not _shows_fault(script) else script


_NOTE = """# This script does not show the fault, which may be in something outside of the configuration, such as a
# hook or trained weights. Replace the line "model = ..." with your own model.
"""
_MEASURED = re.compile(r"\d+\.\d+(e[-+]\d+)?|\d+e[-+]\d+|nan|inf")  # a float as Python prints it, but not an index


def _shows_fault(script: str) -> bool:
    """Run a script, and return whether it prints a number that it would not print for a correct model."""
    printed = io.StringIO()
    try:
        with (
            torch.random.fork_rng(range(torch.cuda.device_count())),
            torch.set_grad_enabled(True),
            contextlib.redirect_stdout(printed),
        ):
            exec(script, {})
    except Exception:  # a script that stops shows nothing, and must not stop the audit
        return False
    numbers = [float(word) for word in printed.getvalue().split() if _MEASURED.fullmatch(word)]
    return not all(number <= _LARGEST for number in numbers)


def script_of_leak(model: object, inputs: Tensor | Mapping[str, Any], leak: CounterExample, seed: int) -> str:
    """Return a script that replaces one token's embedding and prints the change of an output that must not see it.

    The script builds a transformers model from its configuration, with random weights. For other models, or if an
    argument cannot be written in one line, the script is empty.
    """
    arguments = {"input_ids": inputs} if isinstance(inputs, Tensor) else dict(inputs)
    if leak.key is None or not isinstance(ids := arguments.pop("input_ids", None), Tensor):
        return ""
    literals = {name: _literal(value) for name, value in arguments.items()}
    if None in literals.values() or not (model_lines := _model_lines(model, ids, seed)):
        return ""
    more = "".join(f", {name}={value}" for name, value in literals.items())
    (item, row), (other, key) = leak.row, leak.key
    lines = [
        *model_lines,
        "x = model.get_input_embeddings()(ids).detach()",
        f"y = x.clone(); y[{other}, {key}] = torch.randn_like(y[{other}, {key}]) * x.std()",
        f"run = lambda x: model(inputs_embeds=x{more})[0]",
        f"moved = (run(y) - run(x))[{item}, {row}].abs().max() / run(x).square().mean().sqrt()",
        f'print("output {row} moves by", moved.item(), "with token {key}, which it must not see")',
    ]
    return "\n".join(lines) + "\n"


def script_of_pair(model: object, ids: Tensor, claim: str, lengths: Sequence[int], seed: int) -> str:
    """Return a script that runs the model in two equivalent ways and prints how much their rows differ.

    As in `script_of_leak`, the model must be a transformers model. The script is empty for claims that it cannot show.
    """
    if not isinstance(model, nn.Module) or not (model_lines := _model_lines(model, ids, seed)):
        return ""
    with torch.no_grad():
        read = ".logits" if hasattr(model(input_ids=ids), "logits") else ".last_hidden_state"
    lines = claim_lines(claim, model, ids, lengths, read)
    if not lines:
        return ""
    return "\n".join([*model_lines, "torch.set_grad_enabled(False)", *run_lines(model, read), *lines]) + "\n"


def _model_lines(model: object, ids: Tensor, seed: int) -> list[str]:
    """Return script lines that build a transformers model and its tokens; empty for other models."""
    config: Any = getattr(model, "config", None)
    if not type(model).__module__.startswith("transformers.") or not hasattr(config, "to_diff_dict"):
        return []
    left_out = ("architectures", "dtype", "transformers_version", "model_type")
    sizes = {name: value for name, value in config.to_diff_dict().items() if name not in left_out}
    return [
        "import torch, transformers",
        f"torch.manual_seed({seed})",
        f"config = transformers.{type(config).__name__}(**{sizes!r})",
        f"model = transformers.{type(model).__name__}(config).eval()",
        f"ids = torch.tensor({ids.tolist()})",
    ]


def _literal(value: object) -> str | None:
    """Return a Python expression for a value in a script; None for large tensors and unsupported types."""
    if isinstance(value, Tensor):
        if value.numel() and bool((value == 1).all()) and value.dtype == torch.int64:
            return f"torch.ones({list(value.shape)}, dtype=torch.int64)"
        return (
            f"torch.tensor({value.tolist()})"
            if value.numel() <= 4096 and value.dtype in (torch.int64, torch.bool)
            else None
        )
    return repr(value) if isinstance(value, bool | int | float | str | type(None)) else None


class _Claim(NamedTuple):
    """A claim about a model, and how a script calls the model to test the claim."""

    name: str
    model: nn.Module
    begin: str | None  # the offset that is added to positions counted from 0; None if the model takes no positions
    cache: str
    n: int
    lengths: tuple[int, ...]
    read: str

    @property
    def half(self) -> int:
        return self.n // 2


def run_lines(model: nn.Module, read: str) -> list[str]:
    """Return script lines that define two functions: one returns the model's rows, and one compares rows."""
    more = '{"use_cache": False, **more}' if can_cache(model) else "more"
    return [
        f"run = lambda ids, **more: model(input_ids=ids, **{more}){read}",
        "off = lambda a, b: print(((a - b).abs().max() / b.square().mean().sqrt()).item())",
    ]


def claim_lines(
    claim: str, model: nn.Module, ids: Tensor, lengths: Sequence[int] = (), read: str = ".logits"
) -> list[str]:
    """Return script lines that run the model in the two ways that a claim compares; empty for other claims.

    Args:
        claim: the name of the claim in `saccade.auditing.equivalence`.
        model: a transformers model.
        ids: int ``[batch, len]``.
        lengths: lengths of the packed texts.
        read: the attribute of the model's result that holds the rows.
    """
    runner = TransformersRunner(model)
    begin = None
    if "position_ids" in runner.parameters:
        with torch.no_grad():
            first = runner.begin(ids)
        begin = f" + {first}" if first else ""
    write = _WRITTEN.get(re.split(r"\W", claim, maxsplit=1)[0])
    return write(_Claim(claim, model, begin, runner.cache or "", ids.shape[1], tuple(lengths), read)) if write else []


def _batched(claim: _Claim) -> list[str]:
    return ["off(torch.cat([run(one) for one in ids.split(1)]), run(ids))"]


def _trained(claim: _Claim) -> list[str]:
    return training_lines("(model.config, *model.train().modules())", "ids")


def training_lines(parts: str, ids: str) -> list[str]:
    """Return script lines that compare the model in training mode, without dropout, with evaluation mode.

    Args:
        parts: an expression for all objects that may hold a dropout probability.
        ids: the name of the input.
    """
    return [
        f"want = run({ids})",
        f"for part in {parts}:",
        '    zero = {n: 0.0 for n, v in vars(part).items() if type(v) is float and ("drop" in n or n == "p")}',
        "    part.__dict__.update(zero)",
        f"off(run({ids}), want)",
    ]


def _shifted(claim: _Claim) -> list[str]:
    return [f"off(run(ids, position_ids=torch.arange(13, {13 + claim.n}).expand(2, -1){claim.begin}), run(ids))"]


def _padded(claim: _Claim) -> list[str]:
    wide, mask, real = ["ids", "0 * ids[:, :8]"], ["torch.ones_like(ids)", "0 * ids[:, :8]"], f":{claim.n}"
    if claim.name.endswith("left"):
        wide, mask, real = wide[::-1], mask[::-1], "8:"
    places = "" if claim.begin is None else f", position_ids=(mask.cumsum(1) - 1).clamp(min=0){claim.begin}"
    return [
        f"wide, mask = torch.cat([{', '.join(wide)}], 1), torch.cat([{', '.join(mask)}], 1)",
        f"off(run(wide, attention_mask=mask{places})[:, {real}], run(ids))",
    ]


def _packed(claim: _Claim) -> list[str]:
    lines = [f"ids, places = ids[:1], torch.cat([torch.arange(n) for n in {claim.lengths}])[None]{claim.begin}"]
    more = ""
    if claim.name.endswith("a cache"):
        more = ", use_cache=True"
    elif claim.name.endswith("a mask of ones"):
        more = ", attention_mask=torch.ones_like(ids)"
    elif claim.name.endswith("dimensions"):
        more = ", attention_mask=mask"
        tril = ".tril()" if is_causal(claim.model) else ""
        lines += [
            f"seen = torch.block_diag(*[torch.ones(n, n){tril} for n in {claim.lengths}])[None, None]",
            "mask = torch.zeros_like(seen).masked_fill(seen == 0, torch.finfo(seen.dtype).min)",
        ]
    alone = f"torch.cat([run(one) for one in ids.split({list(claim.lengths)}, 1)], 1)"
    return [*lines, f"off(run(ids, position_ids=places{more}), {alone})"]


def _stepped(claim: _Claim) -> list[str]:
    return [
        "state, rows = None, []",
        f"for piece in ids.tensor_split({cuts_of(claim.name, claim.n)}, 1):",
        f'    out = model(input_ids=piece, use_cache=True, **({{}} if state is None else {{"{claim.cache}": state}}))',
        f"    state, rows = out.{claim.cache}, [*rows, out{claim.read}]",
        "off(torch.cat(rows, 1), run(ids))",
    ]


def cuts_of(claim: str, n: int) -> str:
    """Return an expression for the positions where the test of a claim cuts a text of ``n`` tokens into chunks."""
    if found := re.search(r"cut at (\d+)", claim):
        return f"[{found[1]}]"
    splits = {
        "one token first": "[1]",
        "one token last": f"[{n - 1}]",
        "two halves": f"[{n // 2}]",
        "one by one": f"list(range(1, {n}))",
        "pieces of 5": f"list(range(5, {n}, 5))",
    }
    return splits[claim.removeprefix("steps: ")]


def _cached(claim: _Claim) -> list[str]:
    """Return script lines that crop, copy or reorder a cache in the middle of a text and then continue."""
    first, other, rest = f"ids[:, :{claim.half}]", f"ids.flip(1)[:, :{claim.n - claim.half}]", f"ids[:, {claim.half}:]"
    lines = [
        f"more = lambda ids, state: model(input_ids=ids, use_cache=True, {claim.cache}=state){claim.read}",
        f"begun = lambda: model(input_ids={first}, use_cache=True).{claim.cache}",
        "state = begun()",
    ]
    if claim.name == "cache reordered":
        return [
            *lines,
            "rows = torch.tensor([1, 0]); state.reorder_cache(rows)",
            f"off(more({rest}[rows], state), more({rest}, begun())[rows])",
        ]
    if claim.name == "cache cropped":
        lines.append('hasattr(state, "activate_past_recording") and state.activate_past_recording()')
        lines.append(f"_ = more({other}, state); state.crop(-{claim.n - claim.half})")
    else:
        lines.append(f"import copy; _ = more({other}, copy.deepcopy(state))")
    return [*lines, f"off(more({rest}, state), more({rest}, begun()))"]


_WRITTEN: dict[str, Callable[[_Claim], list[str]]] = {
    "one": _batched,
    "in": _trained,
    "positions": _shifted,
    "padded": _padded,
    "packed": _packed,
    "steps": _stepped,
    "cache": _cached,
}
