"""Train a small decoder on sequences longer than one process can hold: context parallel and FSDP2.

    torchrun --nproc-per-node 4 examples/train_over_ranks.py --context 2

puts four processes into two groups of two. Each group reads different rows, and each process of a group half of their
tokens; all four share the parameters. The text is the manual's topics that CPython carries (PSF licence), byte by byte,
several topics packed into a row: none sees another. With one process and the same number of rows in all, the losses are
the same. A checkpoint is written every ten steps, and can be resumed by any number of processes.

Needs ``pip install saccade-attention typer``.
"""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated, NamedTuple

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from saccade.distributed import ContextParallel, parallelize
from saccade.masks import Documents
from saccade.models import Decoder, DecoderConfig

SAVE_EVERY, IGNORED = 10, -100


class Rows(NamedTuple):
    """Rows of bytes, the next byte of each, and the boundaries of topics.

    Attributes:
        tokens: int64 ``[rows, length]``.
        labels: likewise; -100 behind the last byte of a topic.
        lengths: of the topics of each row.
    """

    tokens: Tensor
    labels: Tensor
    lengths: list[list[int]]


def rows_of(step: int, count: int, length: int) -> Rows:
    """Return the rows of a step, the same in every process."""
    drawn = torch.Generator().manual_seed(step)
    texts = [text.encode() for _, text in sorted(topics.items())]
    tokens, lengths = torch.zeros(count, length, dtype=torch.int64), []
    labels = torch.full_like(tokens, IGNORED)
    for row in range(count):
        ends = [0]
        while ends[-1] < length:
            text = torch.tensor(list(texts[int(torch.randint(len(texts), (), generator=drawn))]))
            start, stop = ends[-1], min(ends[-1] + len(text), length)
            tokens[row, start:stop] = text[: stop - start]
            labels[row, start : stop - 1] = text[1 : stop - start]
            ends.append(stop)
        lengths.append([stop - start for start, stop in pairwise(ends)])
    return Rows(tokens, labels, lengths)


def sharded(model: nn.Module, world: int, device: str) -> None:
    """Shard parameters over all processes, layer by layer."""
    mesh = init_device_mesh(device, (world,))
    for layer in model.stack.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def main(
    context: Annotated[int, typer.Option(min=1, help="Processes that share the tokens of a row.")] = 1,
    steps: Annotated[int, typer.Option(min=1)] = 40,
    rows: Annotated[int, typer.Option(min=1, help="Rows of each step, of all groups together.")] = 4,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a row.")] = 2048,
    folder: Annotated[Path | None, typer.Option(help="Where checkpoints are written, and looked for.")] = None,
) -> None:
    """Train, and print the loss in bits per byte."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group()
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    world, rank = dist.get_world_size(), dist.get_rank()
    if world % context or rows % (world // context):
        raise typer.BadParameter(f"{world} processes in groups of {context} must share {rows} rows evenly")
    mesh = init_device_mesh(device, (world // context, context), mesh_dim_names=("data", "context"))
    cp = ContextParallel(mesh["context"], layout="zigzag")
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=256, max_len=length, embed_dim=64, num_heads=4, num_kv_heads=2, num_layers=2, feed_forward_dim=160
    )
    model = parallelize(Decoder(config), cp).to(device)
    sharded(model, world, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    begin = 0 if folder is None else loaded(model, optimizer, folder)
    own = slice(*(rows * (mesh.get_local_rank("data") + one) // (world // context) for one in (0, 1)))
    for step in range(begin, begin + steps):
        batch = rows_of(step, rows, length)
        tokens, labels = (cp.shard_sequence(x[own]).to(device) for x in batch[:2])
        mask = Documents(batch.lengths[own])
        logits = model(tokens, mask=mask, positions=cp.positions(length, device))
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED)
        # Gradients are averaged over processes; the loss is the sum over all processes by the number of all labels.
        count = int((batch.labels != IGNORED).sum())
        optimizer.zero_grad()
        (total * world / count).backward()
        optimizer.step()
        dist.all_reduce(total := total.detach())
        if rank == 0 and (step % 5 == 0 or step == begin + steps - 1):
            print(f"step {step}: {float(total) / count / 0.6931471805599453:.4f} bits per byte", flush=True)
        if folder is not None and (step + 1) % SAVE_EVERY == 0:
            save(model, optimizer, folder, step + 1)
    dist.destroy_process_group()


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, step: int) -> None:
    """Write a checkpoint, each process its part; remove the last one only when this one is complete."""
    older = complete(folder)
    weights, state = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=folder / f"step-{step}")
    if dist.get_rank() == 0:
        for path in older:
            shutil.rmtree(path)


def loaded(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> int:
    """Resume from the last checkpoint, if there is one; return the next step."""
    found = complete(folder)
    if not found:
        return 0
    weights, state = get_state_dict(model, optimizer)
    held = {"model": weights, "optimizer": state}
    checkpoint.load(held, checkpoint_id=found[-1])
    set_state_dict(model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"])
    return int(found[-1].name.removeprefix("step-"))


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints, the oldest first. Their index is written last."""
    found = [path.parent for path in folder.glob("step-*/.metadata")]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


if __name__ == "__main__":
    typer.run(main)
