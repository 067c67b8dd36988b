"""Failures between ranks raise an error on every rank; none hangs or returns uninitialised rows."""

import copy
import os
import signal

import pytest
import torch
import torch.distributed as dist
from tests.distributed.gloo_processes import on_ranks

from saccade import masks
from saccade.distributed import ContextParallel, exchange
from saccade.mechanisms import Softmax
from saccade.nn import MultiHeadAttention


def inputs(n=8, dtype=torch.float32):
    return [torch.randn(1, 2, n, 16, dtype=dtype) for _ in range(3)]


KINDS = ["mask", "dtype", "width", "batch", "seed"]


def other_plans(rank):
    """Return this rank's error for each kind of call that differs on rank 1."""
    told = {}
    for kind in KINDS:
        try:
            other_plan(rank, kind)
        except RuntimeError as error:
            told[kind] = str(error)
    return told


def other_plan(rank, kind):
    mask, tensors, options = masks.Causal(), inputs(), {}
    if rank == 1:
        if kind == "mask":
            mask = masks.Window(2, 2)
        elif kind == "dtype":
            tensors = inputs(dtype=torch.float64)
        elif kind == "width":
            tensors[2] = tensors[2][..., :8]
        elif kind == "batch":
            tensors = [x.expand(3, -1, -1, -1) for x in tensors]
    if kind == "seed":
        options = {"dropout_p": 0.5, "seed": 1 + rank}
    ContextParallel().attention(*tensors, mask, **options)


@pytest.mark.slow
def test_ranks_that_plan_otherwise():
    for told in on_ranks(3, other_plans):
        assert list(told) == KINDS
        assert all("all ranks must make the same plan; ranks 1" in sentence for sentence in told.values())


def killed(rank):
    cp = ContextParallel()
    cp.attention(*inputs(), masks.Causal())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    cp.attention(*inputs(), masks.Causal())
    return "it went on"


@pytest.mark.slow
def test_a_rank_that_is_gone():
    found = on_ranks(3, killed, seconds=20, may_die=True)
    for rank in (0, 2):
        assert "an exchange did not finish: another rank has exited" in found[rank]


def counted(rank):
    """Return the bytes that this rank sends in a forward pass, counted at torch's all-to-all."""
    sent, original = [], dist.all_to_all_single

    def listening(out, given, into, of, group=None):
        sent.append(sum(size for peer, size in enumerate(of) if peer != rank) * given.element_size())
        return original(out, given, into, of, group=group)

    dist.all_to_all_single = listening
    found = {}
    for strategy in ("fetch", "gather", "ulysses"):
        for mask in (None, masks.Causal(), masks.sliding_window(5)):
            sent.clear()
            cp = ContextParallel(strategy=strategy, layout="zigzag")
            leaves = [x.requires_grad_() for x in inputs()]
            out = cp.attention(*leaves, mask)
            forward = sum(sent)
            out.sum().backward()
            plan = exchange(mask, 16, 2, 2, 16, torch.float32, 2, layout="zigzag", strategy=strategy)
            found[strategy, str(mask)] = (
                forward - int(plan.bytes_sent[rank]),
                sum(sent)
                - forward
                - int(plan.bytes_received[rank] if strategy != "ulysses" else plan.bytes_sent[rank]),
            )
    return found


@pytest.mark.slow
def test_bytes_are_those_of_the_plan():
    for found in on_ranks(2, counted):
        assert isinstance(found, dict), found
        assert set(found.values()) == {(0, 0)}, found


def short_masks(rank):
    """Return this rank's errors for a mask that is shorter than the sequence; only one rank has rows beyond it."""
    cp, told = ContextParallel(), []
    own = inputs()
    stands = cp.positions(16)
    for call in (
        lambda: cp.attention(*own, masks.Documents([8])),
        lambda: cp(Softmax())(*own[:2], mask=masks.Documents([8]), q_positions=stands, kv_positions=stands),
    ):
        try:
            told.append(str(call()))
        except ValueError as error:
            told.append(str(error))
    return told


@pytest.mark.slow
def test_a_mask_that_is_too_short_is_refused_on_every_rank():
    for told in on_ranks(2, short_masks):
        assert all("mask must cover the positions of all keys, 0 to 15" in sentence for sentence in told), told


def odd_shapes(rank):
    """Run ranks without rows, batches without items, and lengths that differ between ranks."""
    cp = ContextParallel(layout="striped")
    x = torch.arange(12.0).view(1, 12, 1)
    back = cp.unshard_sequence(cp.shard_sequence(x), seq_len=12)
    plain = ContextParallel()
    empty = [torch.empty(0, 2, 8, 16) for _ in range(2)]
    stands = plain.positions(16)
    matrix = plain(Softmax())(*empty, mask=masks.Causal(), q_positions=stands, kv_positions=stands)
    try:
        plain.unshard_sequence(torch.zeros(1, 3 + rank, 1))
    except RuntimeError as error:
        return torch.equal(back, x), matrix.shape, str(error)
    return "nothing"


@pytest.mark.slow
def test_odd_shapes():
    for found in on_ranks(2, odd_shapes):
        assert isinstance(found, tuple), found
        same, shape, error = found
        assert same
        assert shape[0] == 0
        assert "all ranks must make the same plan" in error


def copies(rank):
    """Copy a layer over ranks, change the copy, and count the plans that are kept after many masks."""
    cp = ContextParallel(dist.new_group([0, 1]))
    layer = MultiHeadAttention(32, 4, mechanism=cp(Softmax()))
    other = copy.deepcopy(layer)
    other.mechanism.scale = 3.0
    for length in range(1, 41):
        mask = masks.Documents([length, 41 - length], rule=masks.Causal())
        cp.attention(*inputs(n=21 if rank == 0 else 20), mask, seq_len=41)
    return (
        other.mechanism.context is cp,
        other.mechanism.mechanism.scale,
        layer.mechanism.mechanism.scale,
        len(cp._made),
    )


@pytest.mark.slow
def test_copies_and_what_is_kept():
    for found in on_ranks(2, copies):
        assert found == (True, 3.0, None, 16), found


def refusals(rank):
    told = []
    cp = ContextParallel(layout="zigzag")
    query, key, value = inputs()
    for call in (
        lambda: cp.attention(query, key, value, seq_len=20),
        lambda: ContextParallel(layout="ring"),
        lambda: ContextParallel(strategy="ring"),
        lambda: ContextParallel(layout=exchange(None, 16, 2, ranks=4).layout),
        lambda: ContextParallel(strategy="ulysses").attention(*inputs(), sink_logit=torch.zeros(2)),
    ):
        try:
            call()
            told.append("")
        except (ValueError, NotImplementedError) as error:
            told.append(str(error))
    return told


@pytest.mark.ci
def test_wrong_arguments_are_refused():
    for told in on_ranks(2, refusals):
        assert isinstance(told, list), told
        starts = (
            "ContextParallel.seq_len: rows must be",
            "ContextParallel: layout must be one of 'contiguous', 'zigzag', 'striped'",
            "ContextParallel: strategy must be one of",
            "ContextParallel: layout must be for 2 ranks; got 4",
            'ContextParallel.attention: strategy="ulysses" cannot run these inputs:',
        )
        for got, start in zip(told, starts, strict=True):
            assert got.startswith(start), got


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match="ContextParallel: a process group must be set up; got none"):
        ContextParallel()
