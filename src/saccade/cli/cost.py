"""``saccade cost``: forecast compute and memory of attention or a model, on one machine or across ranks."""

import json
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from torch import nn

from saccade import costs
from saccade.cli.exit_status import loaded, refuse, refuse_combination, refuse_without
from saccade.cli.loading import load
from saccade.cli.output_files import save_figure
from saccade.costs import Cost, growth
from saccade.distributed import exchange, figures
from saccade.distributed.exchange_plan import Exchange
from saccade.masks import Mask, parse
from saccade.support.language import translated

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}

_DRAWN = 4096  # maximum number of ranks in a figure

_Rule = Annotated[str | None, typer.Argument(metavar="RULE", help='The mask, as in "causal & window(4095, 0)".')]
_Tokens = Annotated[int, typer.Option("--tokens", min=1, help="Length of the whole sequence, in tokens.")]
_Ranks = Annotated[
    int | None,
    typer.Option(min=1, max=65_536, help="Number of devices that the sequence is split over; by default one machine."),
]
_Model = Annotated[
    str | None, typer.Option("--model", metavar="NAME|FOLDER", help="A model instead of a rule; on one machine only.")
]
_Memory = Annotated[
    float | None,
    typer.Option(
        min=0, metavar="GIB", help="Memory in GiB: report what fits into it; by default no report; on one machine only."
    ),
]
_Seconds = Annotated[bool, typer.Option("--seconds", help="Estimate the time; on one machine only.")]
_Heads = Annotated[int, typer.Option(min=1, help="Number of query heads.")]
_KVHeads = Annotated[
    int | None, typer.Option(min=1, help="Number of key and value heads; by default the number of query heads.")
]
_HeadDim = Annotated[int, typer.Option(min=1, help="Width of a head, in channels.")]
_Dtype = Annotated[
    Literal["bfloat16", "float16", "float32", "float64"], typer.Option(help="Number format of keys and values.")
]
_Layout = Annotated[
    Literal["auto", "contiguous", "zigzag", "striped", "balanced"],
    typer.Option(help="How the tokens are divided between ranks."),
]
_Strategy = Annotated[Literal["auto", "fetch", "gather", "ulysses"], typer.Option(help="How ranks exchange keys.")]
_Picture = Annotated[bool, typer.Option("--picture", help="Draw which rank receives keys from which.")]
_Out = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="The file for a figure, .png, .svg or .pdf: memory against length, or time with --seconds; with --ranks, "
        "which rank receives keys from which.",
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print the plan as JSON, rank by rank.")]


def cost(
    context: typer.Context,
    rule: _Rule = None,
    *,
    tokens: _Tokens,
    ranks: _Ranks = None,
    model: _Model = None,
    memory: _Memory = None,
    seconds: _Seconds = False,
    heads: _Heads = 32,
    kv_heads: _KVHeads = None,
    head_dim: _HeadDim = 128,
    dtype: _Dtype = "bfloat16",
    layout: _Layout = "auto",
    strategy: _Strategy = "auto",
    picture: _Picture = False,
    out: _Out = None,
    as_json: _Json = False,
) -> None:
    """Estimate the compute, memory traffic and memory of attention or a model before it is run.

    With --ranks: the traffic, memory and compute of each rank in a forward pass of attention over a sequence that is
    split across ranks. The plan that is estimated to be fastest on an assumed machine is chosen.
    """
    if (rule is None) == (model is None):
        refuse("cost", f"RULE or --model must be given, not both; got {'neither' if rule is None else 'both'}")
    if ranks is None:
        refuse_without(context, "--ranks", ("--layout", "--strategy", "--picture", "--json"))
        size = (heads, heads if kv_heads is None else kv_heads, head_dim)
        cost_on_one_machine(
            "cost", rule, model, tokens, size, _DTYPES[dtype], memory=memory, with_seconds=seconds, out=out
        )
        return
    refuse_combination(context, "--ranks", ("--model", "--memory", "--seconds"), "plans attention over many machines")
    assert rule is not None
    if as_json:
        refuse_combination(context, "--json", ("--picture", "--out"), "prints everything as one object")
    if (picture or out) and ranks > _DRAWN:
        refuse("cost", f"{'--picture' if picture else '--out'} must have at most {_DRAWN:,} ranks; got {ranks:,}")
    try:
        mask = parse(rule)
    except (TypeError, ValueError) as error:
        refuse("cost", f"RULE: {error}")
    try:
        plan = exchange(
            mask, tokens, heads, kv_heads, head_dim, _DTYPES[dtype], ranks, layout=layout, strategy=strategy
        )
    except (TypeError, ValueError, NotImplementedError) as error:
        refuse("cost", str(error).removeprefix("exchange: "))
    typer.echo(json.dumps(_plan_as_json(plan), indent=2, allow_nan=False) if as_json else str(plan))
    if picture:
        typer.echo("\n" + figures.picture(plan))
    if out is not None:
        save_figure("cost", figures.figure(plan), out)


def _plan_as_json(plan: Exchange) -> dict[str, object]:
    names = ("bytes_sent", "bytes_received", "pairs", "peak_bytes")
    return {
        "mask": str(plan.mask),
        "seq_len": plan.seq_len,
        "layout": plan.layout.name,
        "strategy": plan.strategy,
        "rounds": plan.rounds,
        "imbalance": plan.imbalance,
        "refused": {name: list(why) for name, why in plan.refused.items()},
        "tokens": plan.layout.counts.tolist(),
        **{name: getattr(plan, name).tolist() for name in names},
    }


_DOUBLINGS = 7  # a figure ranges from a 128th of the tokens to all of them


def cost_on_one_machine(
    command: str,
    rule: str | None,
    model: str | None,
    tokens: int,
    size: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    memory: float | None,
    with_seconds: bool,
    out: Path | None,
) -> None:
    """Print and draw the cost of a rule or a model; for a rule, ``size`` is (heads, key heads, head width)."""
    try:
        subject: Mask | nn.Module = loaded(command, load, model) if model is not None else parse(rule or "")
    except (TypeError, ValueError) as error:
        refuse(command, f"RULE: {error}")
    heads, kv_heads, head_dim = size

    def cost_at(length: int) -> Cost:
        if isinstance(subject, nn.Module):
            return costs.cost(subject, length)
        return costs.cost(subject, length, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)

    try:
        estimate = cost_at(tokens)
    except (TypeError, ValueError, NotImplementedError) as error:
        refuse(command, str(error).removeprefix("cost: "))
    typer.echo(str(estimate))
    if with_seconds:
        try:
            typer.echo(f"\n{estimate.seconds()}")
        except NotImplementedError as error:
            refuse(command, str(error).removeprefix("Cost.seconds: "))
    memory_bytes = None if memory is None else memory * 2**30
    if memory_bytes is not None:
        run, training = (
            translated("fits" if estimate.fits(memory_bytes, training=is_training) else "does not fit")
            for is_training in (False, True)
        )
        sentence = translated(
            "in {memory:g} GiB: a run {run}, a training step {training}", memory=memory, run=run, training=training
        )
        typer.echo(f"\n{sentence}")
    if out is not None:
        lengths = sorted({max(1, tokens >> halvings) for halvings in range(_DOUBLINGS + 1)})
        if len(lengths) < 2:
            refuse(command, f"--out must be used with at least two tokens; got --tokens {tokens}")
        curve = [*map(cost_at, lengths[:-1]), estimate]
        save_figure(command, growth(curve, "seconds") if with_seconds else growth(curve, memory=memory_bytes), out)
