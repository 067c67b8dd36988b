"""Recurrences and causal linear attention over ranks: what one process gives, gradients too."""

import pytest
import torch
from tests.distributed.gloo_processes import on_ranks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import saccade as sc
from saccade import masks, mechanisms
from saccade.distributed import ContextParallel
from saccade.scorers import BlockMeans, DotProducts

N, HEADS, WIDTH = 48, 4, 8
DOCUMENTS = masks.Causal() & masks.Documents([[11, 37], [30, 18]])


def cases():
    """Mechanism, its gates, and the mask, by name; the same on every rank."""
    torch.manual_seed(5)
    number, channels = (torch.rand(2, HEADS, N, *more, dtype=torch.float64) for more in ((), (WIDTH,)))
    delta = {"beta": number, "decay": -number.flip(2)}
    made = {
        "linear": (mechanisms.Linear(), {}, masks.Causal()),
        "linear, all keys": (mechanisms.Linear(), {}, None),
        "linear, documents": (mechanisms.Linear(), {}, DOCUMENTS),
        "performer": (mechanisms.Performer(16, seed=3), {}, masks.Causal()),
        "delta": (mechanisms.Delta(), delta, masks.Causal()),
        "delta, documents": (mechanisms.Delta(), delta, DOCUMENTS),
        "decays of channels": (
            mechanisms.GatedLinear(),
            {"decay": -channels},
            masks.Causal() & masks.Padding([48, 20]),
        ),
        "ssd": (mechanisms.SSD(HEADS), {"step": number}, masks.Causal()),
        "gated delta 2": (mechanisms.GatedDelta2(), {"erase": channels, "decay": -channels.flip(2)}, DOCUMENTS),
        "mamba-3": (
            mechanisms.Mamba3(),
            {"step": number, "blend": number.flip(1), "decay": -number.flip(2), "angle": channels[..., :3]},
            DOCUMENTS & masks.Padding([48, 40]),
        ),
        "mesa, documents": (mechanisms.Mesa(0.5), delta, DOCUMENTS),
        "state space": (mechanisms.S4D(HEADS, 8), {}, masks.Causal()),
        "state space, documents": (mechanisms.S4D(HEADS, 8), {}, DOCUMENTS),
        # Texts that end where a rank's rows do, and rows of which none is there: nobody reads the memory that comes.
        "state space, texts of ranks": (
            mechanisms.S4D(HEADS, 8),
            {},
            masks.Causal() & masks.Documents([12, 12, 12, 12]),
        ),
        "state space, hidden": (mechanisms.S4D(HEADS, 8), {}, masks.Causal() & masks.Padding([7, 7])),
        "delta, texts of ranks": (mechanisms.Delta(), delta, masks.Causal() & masks.Documents([12, 12, 12, 12])),
    }
    return {name: (mechanism.double(), gates, mask) for name, (mechanism, gates, mask) in made.items()}


def tensors():
    torch.manual_seed(1)
    query, key, value, grad = torch.randn(4, 2, HEADS, N, WIDTH, dtype=torch.float64)
    return query, F.normalize(key, dim=-1), value, grad


def product(mechanism, leaves, names, mask, grad, **where):
    """The output, and the gradients of all leaves and parameters."""
    gates = dict(zip(names, leaves[3:], strict=True))
    out = mechanism(*leaves[:2], mask=mask, **gates, **where).matmul(leaves[2])
    wanted = [*leaves, *mechanism.parameters()]
    found = torch.autograd.grad(out, wanted, grad, allow_unused=True)
    zeros = [torch.zeros(x.shape, dtype=x.dtype) for x in wanted]
    grads = [zero if one is None else one.contiguous() for one, zero in zip(found, zeros, strict=True)]
    return out.detach(), grads[: len(leaves)], grads[len(leaves) :]


def compared(rank, layouts):
    """The largest difference to one process, for each layout and case."""
    found = {}
    for layout in layouts:
        cp = ContextParallel(layout=ContextParallel(layout=layout).layout(N))
        stands = cp.positions(N)
        where = {"q_positions": stands, "kv_positions": stands}
        *given, grad = tensors()
        for name, (mechanism, gates, mask) in cases().items():
            whole = [x.clone().requires_grad_() for x in (*given, *gates.values())]
            own = [cp.shard_sequence(x, 2).requires_grad_() for x in (*given, *gates.values())]
            want, want_grads, want_weights = product(mechanism, whole, gates, mask, grad)
            out, grads, weights = product(cp(mechanism), own, gates, mask, cp.shard_sequence(grad, 2), **where)
            for weight in weights:
                torch.distributed.all_reduce(weight)
            pairs = [*zip([out, *grads], [cp.shard_sequence(x, 2) for x in (want, *want_grads)], strict=True)]
            pairs += zip(weights, want_weights, strict=True)
            found[layout, name] = max([0.0, *(float((a - b).abs().max()) for a, b in pairs if a.numel())])
    return found


@pytest.mark.ci
@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [
        (2, ["zigzag"]),
        # With 48 tokens in stripes of 128 all but the first rank have none.
        pytest.param(4, ["contiguous", "zigzag", "striped"], marks=pytest.mark.slow),
    ],
)
def test_a_memory_goes_from_rank_to_rank(ranks, layouts):
    for found in on_ranks(ranks, compared, layouts):
        assert isinstance(found, dict), found
        assert len(found) == len(layouts) * len(cases())
        assert {case: error for case, error in found.items() if not error < 1e-10} == {}


def nan_and_refusals(rank):
    cp, told = ContextParallel(), []
    query, key, value, _ = tensors()
    value[0, 0, 3, 2] = torch.nan
    stands = cp.positions(N)
    where = {"mask": masks.Causal(), "q_positions": stands, "kv_positions": stands}
    own = [cp.shard_sequence(x, 2) for x in (query, key, value)]
    matrix = cp(mechanisms.Delta())(*own[:2], **where)
    want = cp.shard_sequence(mechanisms.Delta()(query, key, mask=masks.Causal()).matmul(value), 2)
    same = torch.equal(matrix.matmul(own[2]).isnan(), want.isnan())
    for call in (
        matrix.received,
        lambda: matrix.matmul(own[2], dropout_p=0.5),
        lambda: cp(mechanisms.Linformer(WIDTH, 4)),
        lambda: cp(mechanisms.Delta())(own[0][:, :, :5], own[1], **where),
        lambda: cp(mechanisms.Performer(8, redraw=3)),
        lambda: cp(mechanisms.TopK(DotProducts(), 2, block_size=4)),
        lambda: cp(mechanisms.TopK(BlockMeans(), 2, block_size=4)),
        lambda: cp(mechanisms.Delta()).new_cache(),
    ):
        try:
            told.append(str(call()))
        except sc.UnsupportedError as error:
            told.append(str(error))
    return same, told


@pytest.mark.slow
def test_nan_goes_on_and_what_is_not_there_is_refused():
    for found in on_ranks(2, nan_and_refusals):
        assert isinstance(found, tuple), found
        same, told = found
        assert same
        assert "individual weights are not available" in told[0]
        assert "individual weights of earlier tokens cannot be dropped" in told[1]
        assert "needs all keys at once" in told[2]
        assert "5 queries and 24 keys" in told[3]
        assert "it draws new features" in told[4]
        assert "it selects by columns of keys" in told[5]
        assert "it selects by columns of keys" in told[6]
        assert "sharded_cache(model, cp)" in told[7]


def checkpointed(rank):
    """The product alone is computed again in the backward pass."""
    cp, stands = ContextParallel(), ContextParallel().positions(N)
    *given, grad = tensors()
    found = []
    for mechanism in (mechanisms.Delta(), mechanisms.Linear()):
        spread = cp(mechanism)

        def product(query, key, value, spread=spread):
            matrix = spread(query, key, mask=masks.Causal(), q_positions=stands, kv_positions=stands)
            return matrix.matmul(value)

        results = []
        for run in (product, lambda *leaves, product=product: checkpoint(product, *leaves, use_reentrant=False)):
            own = [cp.shard_sequence(x, 2).requires_grad_() for x in given]
            out = run(*own)
            results.append([out, *torch.autograd.grad(out, own, cp.shard_sequence(grad, 2))])
        found += [torch.equal(a, b) for a, b in zip(*results, strict=True)]
    return found


@pytest.mark.slow
def test_a_product_that_is_computed_again():
    for found in on_ranks(2, checkpointed):
        assert found == [True] * 8, found
