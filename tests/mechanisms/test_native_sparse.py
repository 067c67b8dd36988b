"""Native sparse attention is the loop over tokens that its definition describes, and any split is the full run."""

import itertools
import math
from functools import partial

import pytest
import torch
from torch import Tensor

import saccade as sc
from saccade import masks
from saccade.engine.block_sparse.selected_blocks_mask import SelectedBlocks
from saccade.mechanisms import NativeSparse
from saccade.support.errors import UnsupportedError

SIZE, K, WINDOW = 4, 3, 6
CAUSAL = masks.Causal()


def _inputs(n: int, heads: int = 4, kv_heads: int = 2) -> list[Tensor]:
    """Queries, keys, values and gates."""
    shapes = [(2, heads, n, 8), (2, kv_heads, n, 8), (2, kv_heads, n, 5)]
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    return [x.requires_grad_() for x in (*tensors, torch.rand(2, heads, n, 3, dtype=torch.float64))]


def _weighted(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    weights = (keys @ query * query.shape[-1] ** -0.5).softmax(0)
    return weights @ values, weights


def _row(parts: list[Tensor], sink: int, local: int, b: int, group: int, t: int) -> list[Tensor]:
    """The outputs of the heads of one group for one token: compress, sum the weights, rank, read."""
    q, k, v, gates = parts
    share, own = q.shape[1] // k.shape[1], t // SIZE
    blocks = [slice(SIZE * j, SIZE * j + SIZE) for j in range((t + 1) // SIZE)]
    heads, importance, compressed = range(group * share, group * share + share), [0.0] * (own + 1), []
    for h in heads:
        out = torch.zeros(v.shape[3], dtype=v.dtype)
        if blocks:
            keys, values = (torch.stack([x[b, group, block].mean(0) for block in blocks]) for x in (k, v))
            out, weights = _weighted(q[b, h, t], keys, values)
            for j in range(len(blocks)):
                importance[j] += weights[j].item()
        compressed.append(out)
    ranks = [math.inf if j < sink or j > own - local else importance[j] for j in range(own + 1)]
    chosen = sorted(range(own + 1), key=lambda j: (-ranks[j], j))[:K]
    read = sorted(i for j in chosen for i in range(SIZE * j, SIZE * j + SIZE) if i <= t)
    near = slice(max(0, t - WINDOW + 1), t + 1)
    outs = []
    for h, first in zip(heads, compressed, strict=True):
        others = [_weighted(q[b, h, t], k[b, group, span], v[b, group, span])[0] for span in (read, near)]
        outs.append(sum(gate * out for gate, out in zip(gates[b, h, t], (first, *others), strict=True)))
    return outs


def _definition(parts: list[Tensor], sink: int = 0, local: int = 1) -> Tensor:
    q, k, v, _ = parts
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    share = q.shape[1] // k.shape[1]
    for b, group, t in itertools.product(range(2), range(k.shape[1]), range(q.shape[2])):
        for i, row in enumerate(_row(parts, sink, local, b, group, t)):
            out[b, group * share + i, t] = row
    return out


@pytest.mark.ci
@pytest.mark.parametrize(("sink", "local"), [(0, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_outputs_and_gradients_are_those_of_the_definition(kv_heads: int, sink: int, local: int) -> None:
    parts = _inputs(29, kv_heads=kv_heads)
    expected = _definition(parts, sink, local)
    mechanism = NativeSparse(SIZE, K, WINDOW, sink_blocks=sink, local_blocks=local)
    A = mechanism(*parts[:2], gates=parts[3], mask=CAUSAL)
    out, weight = A @ parts[2], torch.randn_like(expected)
    torch.testing.assert_close(out, expected, atol=1e-10, rtol=1e-10)
    grads = torch.autograd.grad(out, parts, weight)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, parts, weight), atol=1e-10, rtol=1e-10)


def test_products_rows_and_dropout_are_those_of_the_dense_matrix() -> None:
    parts = [x.detach() for x in _inputs(29)]
    A = NativeSparse(SIZE, K, WINDOW)(*parts[:2], gates=parts[3], mask=CAUSAL)
    dense, x = A.to_dense(), torch.randn(2, 4, 29, 3, dtype=torch.float64)
    torch.testing.assert_close(A @ parts[2], dense @ parts[2].repeat_interleave(2, 1))
    torch.testing.assert_close(A.mT @ x, dense.mT @ x)
    torch.testing.assert_close(A[1, 3, 20], dense[1, 3, 20])
    torch.testing.assert_close(A.received(), dense.sum(2))
    gates = parts[3].clone()
    gates[:, :, : SIZE - 1, 0] = 0  # nothing has been compressed yet
    torch.testing.assert_close(dense.sum(3), gates.sum(3))
    kept = A.matmul(torch.eye(29, dtype=torch.float64).expand(2, 2, 29, 29), dropout_p=0.4, seed=3)
    torch.testing.assert_close(kept[kept != 0], dense[kept != 0] / 0.6)
    assert 0.5 < (kept != 0).sum() / (dense != 0).sum() < 0.7


def test_without_gates_each_branch_has_a_third() -> None:
    q, k, v, gates = _inputs(29)
    A, third = NativeSparse(SIZE, K, WINDOW), torch.full_like(gates, 1 / 3)
    torch.testing.assert_close(A(q, k, mask=CAUSAL) @ v, A(q, k, gates=third, mask=CAUSAL) @ v)


@pytest.mark.parametrize("edges", [[0, 13, 14, 15, 16, 17, 29], [0, 4, 8, 29], [0, 1, 2, 28, 29]])
def test_any_split_with_a_cache_is_the_full_run(edges: list[int]) -> None:
    q, k, v, gates = (x.detach() for x in _inputs(29))
    mechanism = NativeSparse(SIZE, K, WINDOW)
    cache, out = mechanism.new_cache(), []
    for own in itertools.starmap(slice, itertools.pairwise(edges)):
        make = partial(mechanism, gates=gates[:, :, own])
        out.append(cache.attend(make, q[:, :, own], k[:, :, own], v[:, :, own], mask=CAUSAL))
    full = mechanism(q, k, gates=gates, mask=CAUSAL) @ v
    torch.testing.assert_close(torch.cat(out, 2), full, atol=1e-10, rtol=1e-10)


def test_padding_on_the_right_changes_no_row_of_a_token() -> None:
    q, k, v, gates = _inputs(29)
    mechanism = NativeSparse(SIZE, K, WINDOW)
    padded = mechanism(q, k, gates=gates, mask=CAUSAL & masks.Padding([14, 29]))
    alone = mechanism(q[:1, :, :14], k[:1, :, :14], gates=gates[:1, :, :14], mask=CAUSAL)
    torch.testing.assert_close((padded @ v)[:1, :, :14], alone @ v[:1, :, :14])
    assert not padded.to_dense()[0, :, :, 14:].any()


def test_the_selected_branch_reads_k_blocks_of_its_group() -> None:
    q, k, _, gates = _inputs(29)
    (_, means), (_, chosen), (_, near) = NativeSparse(SIZE, K, WINDOW)(q, k, gates=gates, mask=CAUSAL).terms
    assert isinstance(chosen.inputs.rule, SelectedBlocks)
    reads = (chosen.to_dense() > 0).unflatten(1, (2, 2))
    assert torch.equal(reads[:, :, 0], reads[:, :, 1])
    assert int(reads[:, :, 0, 28].sum(-1).max()) == SIZE * (K - 1) + 29 % SIZE
    assert not torch.equal(reads[:, 0, 0], reads[:, 1, 0])
    assert means.is_stochastic
    assert near.inputs.rule == CAUSAL & masks.sliding_window(WINDOW)


def test_cost_counts_the_pairs_that_each_branch_reads() -> None:
    n, width = 512, 16
    told = sc.cost(NativeSparse(32, 3, 40), n, mask=CAUSAL, num_heads=1, head_dim=width)
    q, k = torch.randn(2, 1, 1, n, width)
    branches = [matrix for _, matrix in NativeSparse(32, 3, 40)(q, k, mask=CAUSAL).terms]
    last = [int((matrix[0, 0, n - 1] > 0).sum()) for matrix in branches]
    assert last == [n, 96, 40]
    attention = sum(step.flops for step in told.decode.steps if step.kernel)
    assert attention == 4 * width * (n // 32 + 96 + 40)
    assert told.forward.flops < sc.cost(CAUSAL, n, num_heads=1, head_dim=width).forward.flops
    assert told.cache_bytes == 2 * n * width * 4


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (None, "is not causal: a block is compressed after its last token"),
        (masks.Documents([14, 15]) & CAUSAL, "Documents is neither Causal nor padding on the right"),
        (masks.Padding([14, 29], "left", 29) & CAUSAL, "Padding is neither Causal nor padding on the right"),
        (masks.sliding_window(5), "Window is neither Causal nor padding on the right"),
    ],
    ids=str,
)
def test_other_masks_are_refused(mask: masks.Mask | None, said: str) -> None:
    q, k, _, _ = _inputs(29)
    with pytest.raises(UnsupportedError, match=said):
        NativeSparse(SIZE, K, WINDOW)(q, k, mask=mask)


def test_positions_with_gaps_are_refused() -> None:
    q, k, _, _ = _inputs(29)
    where = torch.stack([torch.arange(29), torch.arange(29) - 6]).clamp(min=-1)
    for positions in (where, range(3, 32)):
        with pytest.raises(UnsupportedError, match="blocks are counted from position 0, without gaps"):
            NativeSparse(SIZE, K, WINDOW)(q, k, mask=CAUSAL, q_positions=positions, kv_positions=positions)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"block_size": 0}, "block_size must be an int of at least 1"),
        ({"k": 0}, "k must be an int of at least 1"),
        ({"window": 0}, "window must be an int of at least 1"),
        ({"local_blocks": 0}, "local_blocks must be an int of at least 1"),
        ({"k": 2, "sink_blocks": 2}, r"k must be at least sink_blocks \+ local_blocks; got 2 with 2 \+ 1"),
    ],
)
def test_sizes_are_checked(wrong: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=f"NativeSparse: {said}"):
        NativeSparse(**wrong)


def test_gates_must_be_three_for_each_query() -> None:
    q, k, _, gates = _inputs(29)
    with pytest.raises(ValueError, match=r"gates must have shape .* = \[2, 4, 29, 3\]; got \[2, 4, 29, 2\]"):
        NativeSparse(SIZE, K, WINDOW)(q, k, mask=CAUSAL, gates=gates[..., :2])


@pytest.mark.ci
def test_compiled_programs_break_where_blocks_are_chosen() -> None:
    torch.compiler.reset()
    q, k, v, gates = (x.detach() for x in _inputs(29))
    mechanism = NativeSparse(SIZE, K, WINDOW)
    program = torch.compile(
        lambda q, k, v, gates: mechanism(q, k, gates=gates, mask=CAUSAL).matmul(v).sin(), backend="eager"
    )
    torch.testing.assert_close(program(q, k, v, gates), (mechanism(q, k, gates=gates, mask=CAUSAL) @ v).sin())
