"""Attention over ranks equals attention in one process: outputs and all gradients, by strategy, layout and mask."""

import pytest
import torch
from tests.distributed.gloo_processes import on_ranks

import saccade as sc
from saccade import masks, positions
from saccade.distributed import ContextParallel, Machine, exchange
from saccade.mechanisms import Linformer, Softmax, TopK
from saccade.scorers import DotProducts

N = 48
MASKS = {
    "full": None,
    "causal": masks.Causal(),
    "window": masks.sliding_window(5),
    "wide window": masks.sliding_window(40),
    "both sides": masks.Window(7, 3),
    "longformer": masks.longformer(3, [0, 30]),
    "bigbird": masks.bigbird(4, random_blocks=1),
    "documents": masks.Documents([11, 20, 17], rule=masks.Causal()),
    "documents of each item": masks.Documents([[11, 37], [48]], rule=masks.Causal()),
    "strided": masks.Causal() & masks.Strided(4),
    "padding": masks.Causal() & masks.Padding([48, 20]),
    "nothing early": masks.Causal() & ~masks.Window(3, 0),
    "a function": masks.Predicate(lambda b, h, q, kv: (q - kv) % 3 != 1),
}
OPTIONS = {
    "plain": {},
    "softcap and alibi": {"softcap": 3.0, "bias": positions.ALiBi(4)},
    "sink and dropout": {"sink_logit": torch.linspace(-1, 1, 4, dtype=torch.float64), "dropout_p": 0.3, "seed": 7},
}


def whole(kv_heads=2):
    torch.manual_seed(1)
    shapes = [(4, 16), (kv_heads, 16), (kv_heads, 12)]
    return [torch.randn(2, heads, N, width, dtype=torch.float64) for heads, width in shapes]


def on_one(tensors, mask, options):
    leaves = [x.clone().requires_grad_() for x in tensors]
    options = dict(options)
    seed, dropout_p = options.pop("seed", None), options.pop("dropout_p", 0.0)
    out = sc.AttentionMatrix(*leaves[:2], mask, **options).matmul(leaves[2], dropout_p=dropout_p, seed=seed)
    torch.manual_seed(2)
    grads = torch.autograd.grad(out, leaves, torch.randn(out.shape, dtype=out.dtype))
    return [x.detach() for x in (out, *grads)]


def compared(rank, layouts, strategies, kv_heads, names):
    """Return for each case the largest difference between this rank's rows and those of one process."""
    found = {}
    for layout in layouts:
        for strategy in strategies:
            for name in names:
                for kind, options in OPTIONS.items():
                    if strategy == "ulysses" and kind != "plain":
                        continue
                    mask = MASKS[name]
                    expected = on_one(whole(kv_heads), mask, options)
                    made = layout
                    if layout == "balanced":
                        plan = exchange(
                            mask, N, 4, kv_heads, 16, ranks=torch.distributed.get_world_size(), layout=layout
                        )
                        made = plan.layout
                    cp = ContextParallel(layout=made, strategy=strategy)
                    own = [cp.shard_sequence(x, 2).requires_grad_() for x in whole(kv_heads)]
                    out = cp.attention(*own, mask, seq_len=N, **options)
                    torch.manual_seed(2)
                    grad = cp.shard_sequence(torch.randn(2, 4, N, 12, dtype=torch.float64), 2)
                    results = [out, *torch.autograd.grad(out, own, grad)]
                    rows = [cp.shard_sequence(x, 2) for x in expected]
                    errors = [
                        float((a - b).abs().max()) if a.numel() else 0.0 for a, b in zip(results, rows, strict=True)
                    ]
                    found[layout, strategy, name, kind] = max(errors)
    return found


@pytest.mark.ci
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_it_is_attention_over_the_whole(ranks):
    kv_heads = ranks if ranks == 4 else 2
    strategies = ("fetch", "gather", "ulysses")
    names = list(MASKS) if ranks == 4 else list(MASKS)[::3]
    for found in on_ranks(ranks, compared, ("contiguous", "zigzag"), strategies, kv_heads, names):
        assert isinstance(found, dict), found
        assert {case: error for case, error in found.items() if not error < 1e-10} == {}
        assert len(found) == 2 * len(names) * (3 + 3 + 1)


@pytest.mark.slow
def test_grouped_heads_other_layouts_and_ranks_without_rows():
    names = ["causal", "window", "longformer", "documents", "padding"]
    for found in on_ranks(4, compared, ("striped", "balanced"), ("fetch", "gather"), 2, names):
        assert isinstance(found, dict), found
        assert {case: error for case, error in found.items() if not error < 1e-10} == {}


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_strategy_mask_layout_and_number_of_key_heads(ranks, kv_heads):
    strategies = ("fetch", "gather", *(["ulysses"] if kv_heads % ranks == 0 else []))
    layouts = ("contiguous", "zigzag", "striped", "balanced")
    for found in on_ranks(ranks, compared, layouts, strategies, kv_heads, list(MASKS), seconds=300):
        assert isinstance(found, dict), found
        assert {case: error for case, error in found.items() if not error < 1e-10} == {}
        assert len(found) == len(layouts) * len(MASKS) * (6 + len(strategies) - 2)


def auto(rank):
    """Run "auto" on a machine without latency; return the strategy, errors of products, and messages of refusals."""
    torch.manual_seed(0)
    tensors = torch.randn(3, 2, 4, N, 16, dtype=torch.float64).unbind()
    cp = ContextParallel(machine=Machine(latency=0.0))
    own, stands = [cp.shard_sequence(x, 2) for x in tensors], cp.positions(N)
    sink = torch.linspace(-1, 1, 4, dtype=torch.float64)
    made = [
        cp.attention(*own),
        cp(Softmax())(*own[:2], q_positions=stands, kv_positions=stands).matmul(own[2]),
        cp.attention(*own, sink_logit=sink),
    ]
    whole = sc.attention(*tensors)
    want = [whole, whole, sc.AttentionMatrix(*tensors[:2], sink_logit=sink).matmul(tensors[2])]
    errors = [float((a - cp.shard_sequence(b, 2)).abs().max()) for a, b in zip(made, want, strict=True)]
    told = []
    late = torch.stack([stands, stands + 1])
    for given in (late, stands[:-1], None):
        try:
            cp(Softmax())(*own[:2], q_positions=given, kv_positions=stands)
        except ValueError as error:
            told.append(str(error))
    return cp.plan(*own[:2], None, N).strategy, errors, told


@pytest.mark.slow
def test_auto_exchanges_heads_only_where_that_is_exact():
    for found in on_ranks(4, auto):
        assert isinstance(found, tuple), found
        strategy, errors, told = found
        assert strategy == "ulysses"
        assert max(errors) < 1e-10
        assert "q_positions must be the positions of this rank's rows, in order" in told[0]
        assert "q_positions must have shape [12] or [2, 12]" in told[1]
        assert "q_positions must be given" in told[2]


def half_precision(rank):
    cp = ContextParallel(layout="zigzag")
    tensors = [x.bfloat16() for x in whole()]
    own = [cp.shard_sequence(x, 2).requires_grad_() for x in tensors]
    out = cp.attention(*own, masks.Causal())
    out.float().square().sum().backward()
    leaves = [x.double().requires_grad_() for x in tensors]
    want = sc.attention(*leaves, masks.Causal())
    want.square().sum().backward()
    pairs = zip([out, *(x.grad for x in own)], [want, *(x.grad for x in leaves)], strict=True)
    return [float((a.double() - cp.shard_sequence(b, 2)).abs().max() / b.abs().max()) for a, b in pairs]


@pytest.mark.slow
def test_half_precision_is_rounded_once():
    for errors in on_ranks(2, half_precision):
        assert isinstance(errors, list), errors
        assert max(errors) < 2e-2


def perturbed(rank, strategy):
    """Return for each mask whether exactly the rows that see a token change with it."""
    found = {}
    for name, mask in MASKS.items():
        cp, moved = ContextParallel(strategy=strategy), 20
        rows = []
        for shift in (0.0, 1.0):
            tensors = whole(2)
            for x in tensors[1:]:
                x[:, :, moved] += shift
            out = cp.attention(*(cp.shard_sequence(x, 2) for x in tensors), mask, seq_len=N)
            rows.append(cp.unshard_sequence(out, 2, seq_len=N))
        seen = (masks.Full() if mask is None else mask).to_dense(N, batch=2, heads=4)[..., moved]
        found[name] = bool((((rows[0] != rows[1]).any(-1)) == seen).all())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fetch", "gather"])
def test_one_token_moves_what_the_mask_allows(strategy):
    for found in on_ranks(2, perturbed, strategy):
        assert isinstance(found, dict), found
        assert all(found.values()), found


def layers(rank):
    """Return the results of attention layers whose mechanism runs over ranks, and of their matrices."""
    cp, found = ContextParallel(layout="zigzag"), []
    for mechanism in (Softmax(), TopK(DotProducts(), 5)):
        torch.manual_seed(3)
        rotary = positions.Rotary(8)
        one = sc.nn.MultiHeadAttention(32, 4, mask=masks.Causal(), rotary=rotary, mechanism=mechanism).double()
        torch.manual_seed(3)
        many = sc.nn.MultiHeadAttention(32, 4, mask=masks.Causal(), rotary=rotary, mechanism=cp(mechanism)).double()
        many.load_state_dict(one.state_dict(), strict=False)
        torch.manual_seed(4)
        x = torch.randn(2, N, 32, dtype=torch.float64)
        own = cp.shard_sequence(x).requires_grad_()
        out = many(own, positions=cp.positions(N))
        leaf = x.clone().requires_grad_()
        want = one(leaf)
        (grad,) = torch.autograd.grad(out.square().sum(), own)
        (whole_grad,) = torch.autograd.grad(want.square().sum(), leaf)
        found += [
            float((out - cp.shard_sequence(want)).abs().max()),
            float((grad - cp.shard_sequence(whole_grad)).abs().max()),
        ]
    query, key, _ = whole()
    matrix = cp(Softmax())(
        cp.shard_sequence(query, 2),
        cp.shard_sequence(key, 2),
        mask=masks.Causal(),
        q_positions=cp.positions(N),
        kv_positions=cp.positions(N),
    )
    entropy = sc.AttentionMatrix(query, key, masks.Causal()).entropy()
    found.append(float((matrix.entropy() - cp.shard_sequence(entropy, 2)).abs().max()))
    try:
        cp(Linformer(16, 4))
    except sc.UnsupportedError as error:
        return found, str(error)
    return found, ""


@pytest.mark.slow
def test_layers_and_their_matrices():
    for told in on_ranks(2, layers):
        assert isinstance(told, tuple), told
        errors, refusal = told
        assert max(errors) < 1e-10
        assert "Linformer needs all keys at once" in refusal


def gathered(rank):
    cp = ContextParallel(layout="zigzag")
    x = torch.arange(2 * 10 * 3, dtype=torch.float64).view(2, 10, 3)
    own = cp.shard_sequence(x).requires_grad_()
    back = cp.unshard_sequence(own, seq_len=10)
    back.sum().backward()
    return torch.equal(back, x), float(own.grad.min()), float(own.grad.max())


@pytest.mark.slow
def test_rows_come_back():
    for found in on_ranks(3, gathered):
        assert found == (True, 3.0, 3.0)
