"""``saccade cost`` on one machine."""

from pathlib import Path

import torch
import typer
from torch import nn

from saccade.cli.exits import loaded, refuse
from saccade.cli.loading import load
from saccade.cli.output_files import put
from saccade.costs import Cost, cost, growth
from saccade.masks import Mask, parse

_DOUBLINGS = 7  # a figure goes from a 128th of the tokens to all of them


def here(
    command: str,
    rule: str | None,
    model: str | None,
    tokens: int,
    size: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    memory: float | None,
    asks_seconds: bool,
    out: Path | None,
) -> None:
    """Print what a rule or a model costs, and draw it; ``size`` is heads, key heads and width of the rule's tensors."""
    try:
        subject: Mask | nn.Module = loaded(command, load, model) if model is not None else parse(rule or "")
    except (TypeError, ValueError) as error:
        refuse(command, f"RULE: {error}")
    heads, kv_heads, head_dim = size

    def at(length: int) -> Cost:
        if isinstance(subject, nn.Module):
            return cost(subject, length)
        return cost(subject, length, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)

    try:
        told = at(tokens)
    except (TypeError, ValueError, NotImplementedError) as error:
        refuse(command, str(error).removeprefix("cost: "))
    typer.echo(str(told))
    if asks_seconds:
        try:
            typer.echo(f"\n{told.seconds()}")
        except NotImplementedError as error:
            refuse(command, str(error).removeprefix("Cost.seconds: "))
    room = None if memory is None else memory * 2**30
    if room is not None:
        answers = {True: "fits", False: "does not fit"}
        typer.echo(f"\nin {memory:g} GiB: a run {answers[told.fits(room)]}", nl=False)
        typer.echo(f", a training step {answers[told.fits(room, training=True)]}")
    if out is not None:
        lengths = sorted({max(1, tokens >> halvings) for halvings in range(_DOUBLINGS + 1)})
        if len(lengths) < 2:
            refuse(command, f"--out must come with two tokens or more; got --tokens {tokens}")
        costs = [*map(at, lengths[:-1]), told]
        put(command, growth(costs, "seconds") if asks_seconds else growth(costs, memory=room), out)
