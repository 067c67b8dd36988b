"""``saccade cost`` on one machine."""

import torch
import typer
from torch import nn

from saccade.cli.loading import load
from saccade.cli.refusal import loaded, refuse
from saccade.costs import cost
from saccade.masks import Mask, parse

__all__ = ["here"]


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
) -> None:
    """Print what a rule or a model costs; ``size`` is heads, key heads and width of the rule's tensors."""
    try:
        subject: Mask | nn.Module = loaded(command, load, model) if model is not None else parse(rule or "")
    except (TypeError, ValueError) as error:
        refuse(command, f"RULE: {error}")
    heads, kv_heads, head_dim = size
    try:
        if isinstance(subject, nn.Module):
            told = cost(subject, tokens)
        else:
            told = cost(subject, tokens, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    except (TypeError, ValueError, NotImplementedError) as error:
        refuse(command, str(error).removeprefix("cost: "))
    typer.echo(str(told))
    if asks_seconds:
        typer.echo(f"\n{told.seconds()}")
    if memory is not None:
        room = memory * 2**30
        answers = {True: "fits", False: "does not fit"}
        typer.echo(f"\nin {memory:g} GiB: a run {answers[told.fits(room)]}", nl=False)
        typer.echo(f", a training step {answers[told.fits(room, training=True)]}")
