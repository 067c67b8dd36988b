"""``saccade cost``: what attention or a model computes and holds, here or over ranks, before anything is run."""

import json
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer

from saccade.cli.cost_here import here
from saccade.cli.exits import refuse, refuse_beside, refuse_without
from saccade.cli.output_files import put
from saccade.distributed import exchange, figures
from saccade.distributed.exchange_plan import Exchange
from saccade.masks import parse

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}

_DRAWN = 4096  # ranks, of which each row and column is looked at

_Rule = Annotated[
    str | None, typer.Argument(metavar="RULE", help='Who may see whom, as in "causal & window(4095, 0)".')
]
_Tokens = Annotated[int, typer.Option("--tokens", min=1, help="Length of the whole sequence, in tokens.")]
_Ranks = Annotated[
    int | None,
    typer.Option(min=1, max=65_536, help="Devices that the sequence is split over; one machine when left out."),
]
_Model = Annotated[
    str | None, typer.Option("--model", metavar="NAME|FOLDER", help="A model, instead of a rule; on one machine.")
]
_Memory = Annotated[
    float | None,
    typer.Option(
        min=0, metavar="GIB", help="Memory in GiB: say what fits in it; nothing is said when left out; on one machine."
    ),
]
_Seconds = Annotated[bool, typer.Option("--seconds", help="Say how long it takes; on one machine.")]
_Heads = Annotated[int, typer.Option(min=1, help="Heads of queries.")]
_KVHeads = Annotated[
    int | None, typer.Option(min=1, help="Heads of keys and values; as many as of queries when left out.")
]
_HeadDim = Annotated[int, typer.Option(min=1, help="Width of a head, in numbers.")]
_Dtype = Annotated[
    Literal["bfloat16", "float16", "float32", "float64"], typer.Option(help="Number format of keys and values.")
]
_Layout = Annotated[
    Literal["auto", "contiguous", "zigzag", "striped", "balanced"], typer.Option(help="Which rank holds which tokens.")
]
_Strategy = Annotated[Literal["auto", "fetch", "gather", "ulysses"], typer.Option(help="How queries and keys meet.")]
_Picture = Annotated[bool, typer.Option("--picture", help="Draw who gets keys from whom.")]
_Out = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="The file for a figure, .png, .svg or .pdf: memory against length, or time with --seconds; with --ranks, "
        "who gets keys from whom.",
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
    """Say what attention or a model computes, moves and holds, before it is run.

    With --ranks: what attention over a sequence on many ranks sends, holds and computes, forward, by rank. The fastest
    plan is chosen for a machine that is assumed.
    """
    if (rule is None) == (model is None):
        refuse("cost", "RULE must be given, or --model instead of it")
    if ranks is None:
        refuse_without(context, "--ranks", ("--layout", "--strategy", "--picture", "--json"))
        size = (heads, heads if kv_heads is None else kv_heads, head_dim)
        here("cost", rule, model, tokens, size, _DTYPES[dtype], memory=memory, asks_seconds=seconds, out=out)
        return
    refuse_beside(context, "--ranks", ("--model", "--memory", "--seconds"), "plans attention over many machines")
    assert rule is not None
    if as_json:
        refuse_beside(context, "--json", ("--picture", "--out"), "prints all as one object")
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
    typer.echo(json.dumps(_told(plan), indent=2, allow_nan=False) if as_json else str(plan))
    if picture:
        typer.echo("\n" + figures.picture(plan))
    if out is not None:
        put("cost", figures.figure(plan), out)


def _told(plan: Exchange) -> dict[str, object]:
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
