"""Every module equals its paper's formula, has right gradients, and takes the smallest and emptiest maps."""

import pytest
import torch
from tests.vision import definitions
from torch import nn

import saccade as sc
from saccade import vision
from saccade.vision.non_local import KINDS

MODULES = {
    "channel": lambda: vision.ChannelAttention(8, ratio=2),
    "channel-max": lambda: vision.ChannelAttention(8, ratio=4, pooling=("average", "max"), projection_bias=False),
    "eca": lambda: vision.ECA(8),
    "eca-wide": lambda: vision.ECA(8, kernel_size=5),
    "spatial": lambda: vision.SpatialAttention(3),
    "spatial-plain": lambda: vision.SpatialAttention(7, norm=False),
    "position": lambda: vision.PositionAttention(8, ratio=2),
    "cbam": lambda: vision.CBAM(8, ratio=2, kernel_size=3),
    "cbam-reversed": lambda: vision.CBAM(8, 4, 5, order="spatial-channel", projection_bias=True),
    "bam": lambda: vision.BAM(8, ratio=2, dilation=2),
    **{f"non-local-{kind}": lambda kind=kind: vision.NonLocal(8, kind=kind, bottleneck=3) for kind in KINDS},
    "non-local-subsampled": lambda: vision.NonLocal(8, subsample=2, scale=None),
}


def _as_timm_names(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters under timm's names, by a table independent of the conversion under test."""
    theirs = {"reduce": "fc1", "expand": "fc2", "query": "t", "key": "p", "value": "g", "output": "z"}
    renamed = {}
    for name, own in module.state_dict().items():
        parts = [theirs.get(part, part) for part in name.split(".")]
        if "conv" in parts:
            parts = [*parts[: parts.index("conv")], "conv", *parts[parts.index("conv") :]]
        elif "norm" in parts and not isinstance(module, vision.NonLocal):
            parts = [*parts[: parts.index("norm")], "conv", "bn", parts[-1]]
        renamed[".".join(parts)] = own
    return renamed


def _expected(name: str, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    own, state = module.state_dict(), _as_timm_names(module)
    gates = {
        "channel": lambda: definitions.channel_gate(x, state, with_max=name == "channel-max"),
        "eca": lambda: definitions.eca_gate(x, own),
        "spatial": lambda: definitions.spatial_gate(x, state),
    }
    for kind, gate in gates.items():
        if name.startswith(kind):
            return x * gate()
    if name.startswith("cbam"):
        return definitions.cbam(x, state, channels_first=name == "cbam")
    if name == "bam":
        return x + x * definitions.bam_gate(x, own, module.dilation)
    if name == "position":
        return definitions.position(x, own)
    scale = module.bottleneck**-0.5 if name == "non-local-subsampled" else 1.0
    return definitions.non_local(x, state, kind=module.kind, subsample=module.subsample, scale=scale)


@pytest.mark.parametrize("name", MODULES)
def test_outputs_are_the_paper_s(name: str, drawn) -> None:
    module = drawn(MODULES[name]()).double()
    x = torch.randn(2, 8, 5, 7, dtype=torch.float64)
    expected = _expected(name, module, x)
    torch.testing.assert_close(module(x), expected, rtol=1e-9, atol=1e-9)
    single = drawn(MODULES[name]())
    torch.testing.assert_close(single(x.float()), expected.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", MODULES)
def test_gradients(name: str, training: bool, drawn) -> None:
    module = drawn(MODULES[name]()).double().train(training)
    x = torch.randn(2, 8, 3, 4, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*module.named_parameters(), strict=True)

    def run(x: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, dict(zip(names, values, strict=True)), x)

    assert torch.autograd.gradcheck(run, (x, *parameters), fast_mode=True)


@pytest.mark.parametrize("name", MODULES)
def test_empty_batches_and_single_positions(name: str) -> None:
    module = MODULES[name]()
    before = {key: own.clone() for key, own in module.state_dict().items()}
    empty = module(torch.zeros(0, 8, 5, 7))
    assert empty.shape == (0, 8, 5, 7)
    empty.sum().backward()
    for key, own in module.state_dict().items():
        assert torch.equal(own, before[key])
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in module.parameters())
    x = torch.randn(3, 8, 1, 1)
    assert module(x).shape == x.shape
    assert module(x).isfinite().all()
    assert module.eval()(x[:1]).isfinite().all()


@pytest.mark.parametrize("name", MODULES)
def test_training_changes_every_parameter_and_starts_learning(name: str) -> None:
    module, x = MODULES[name](), torch.randn(4, 8, 5, 7)
    target = torch.randn(4, 8, 5, 7)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = (module(x) - target).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["position", *(name for name in MODULES if name.startswith("non-local"))])
def test_a_fresh_block_between_positions_is_the_identity(name: str) -> None:
    x = torch.randn(2, 8, 5, 7)
    module = MODULES[name]()
    assert torch.equal(module(x), x)
    assert torch.equal(module.eval()(x), x)


@pytest.mark.parametrize("name", MODULES)
def test_copies_layouts_and_autocast(name: str, drawn) -> None:
    module, x = drawn(MODULES[name]()), torch.randn(2, 8, 5, 7)
    expected = module(x)
    torch.testing.assert_close(module(x.contiguous(memory_format=torch.channels_last)), expected)
    other = MODULES[name]()
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.eval()(x), expected)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(module(x).float(), expected, rtol=0.1, atol=0.25)
    assert module.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


def test_weights_are_what_forward_applies(drawn) -> None:
    x = torch.randn(2, 8, 5, 7)
    channel = drawn(vision.ChannelAttention(8, 2))
    spatial = drawn(vision.SpatialAttention(3))
    torch.testing.assert_close(channel(x), x * channel.weights(x)[:, :, None, None])
    torch.testing.assert_close(spatial(x), x * spatial.weights(x))
    assert channel.weights(x).shape == (2, 8)
    assert spatial.weights(x).shape == (2, 1, 5, 7)
    for order in ("channel-spatial", "spatial-channel"):
        both = drawn(vision.CBAM(8, 2, 3, order=order))
        gates = both.weights(x)
        assert isinstance(gates, vision.Gates)
        torch.testing.assert_close(both(x), x * gates.channel[:, :, None, None] * gates.spatial)
    joint = drawn(vision.BAM(8, 2))
    gates = joint.weights(x)
    logits = torch.logit(gates.channel)[:, :, None, None] + torch.logit(gates.spatial)
    torch.testing.assert_close(joint.gate(x), logits.sigmoid())
    assert gates.channel.shape == (2, 8)
    assert gates.spatial.shape == (2, 1, 5, 7)


def test_the_order_of_the_gates_matters(drawn) -> None:
    x = torch.randn(2, 8, 5, 7)
    first, second = (drawn(vision.CBAM(8, 2, 3, order=order)) for order in ("channel-spatial", "spatial-channel"))
    assert not torch.allclose(first(x), second(x), atol=1e-3)


@pytest.mark.parametrize("name", ["position", "non-local-embedded", "non-local-gaussian", "non-local-subsampled"])
def test_matrices_are_lazy_and_count_positions_row_by_row(name: str, drawn) -> None:
    module, x = drawn(MODULES[name]()), torch.randn(2, 8, 5, 7)
    matrix = module.matrix(x)
    assert isinstance(matrix, sc.Matrix)
    assert matrix.shape == (2, 1, 35, 12 if name == "non-local-subsampled" else 35)
    torch.testing.assert_close(matrix.to_dense().sum(-1), torch.ones(2, 1, 35))
    keys = nn.functional.max_pool2d(x, 2, ceil_mode=True) if name == "non-local-subsampled" else x
    query, key = (x, keys) if name == "non-local-gaussian" else (module.query(x), module.key(keys))
    scale = 0.5 if name == "non-local-subsampled" else 1.0
    query, key = query.detach(), key.detach()
    at = torch.tensor([query[1, :, 3, 2] @ key[1, :, y, x] for y in range(key.shape[2]) for x in range(key.shape[3])])
    torch.testing.assert_close(matrix[1, 0, 3 * 7 + 2], (scale * at).softmax(0))


def test_kinds_without_softmax_have_no_matrix() -> None:
    for kind in ("dot", "concatenation"):
        with pytest.raises(sc.UnsupportedError, match=f"kind '{kind}' has weights that can be negative"):
            vision.NonLocal(8, kind=kind).matrix(torch.zeros(1, 8, 2, 2))


@pytest.mark.parametrize("kind", ["embedded", "dot", "concatenation"])
def test_memory_is_linear_in_the_positions(kind: str, largest_allocation) -> None:
    """The matrix of all pairs would have 16 times the entries when the sides double."""
    block = vision.NonLocal(2, kind=kind, bottleneck=1)
    sizes = []
    for side in (32, 64):
        x = torch.randn(1, 2, side, side, requires_grad=True)
        with largest_allocation() as seen:
            block(x).sum().backward()
        sizes.append(max(seen))
    assert sizes[1] <= 6 * sizes[0]
    assert sizes[1] < 64**4 / 8


def test_rectified_sums_where_everything_ties_or_nothing_is_left() -> None:
    from saccade.vision.non_local import rectified_sum_mean  # noqa: PLC0415  not public

    value = torch.randn(1, 4, 2)
    for a, b in (([-1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]), ([-9.0, 2.0, -1.0], [1.0, -2.0, 1.0, 3.0])):
        query, key = torch.tensor([a], requires_grad=True), torch.tensor([b], requires_grad=True)
        expected = torch.relu(query[:, :, None] + key[:, None]) @ value / 4
        got = rectified_sum_mean(query, key, value)
        torch.testing.assert_close(got, expected)
        # For a sum of exactly 0, torch's ReLU has the slope 0; so have we.
        for own, other in zip(*(torch.autograd.grad(y.sum(), (query, key)) for y in (got, expected)), strict=True):
            torch.testing.assert_close(own, other)


def test_the_kernel_of_eca_grows_with_the_channels() -> None:
    sizes = {channels: vision.ECA(channels).kernel_size for channels in (1, 8, 64, 100, 128, 256, 512, 1024, 2048)}
    # The authors': t = int(abs((log2(C) + 1) / 2)), and t + 1 where t is even.
    assert sizes == {1: 1, 8: 3, 64: 3, 100: 3, 128: 5, 256: 5, 512: 5, 1024: 5, 2048: 7}
    assert vision.ECA(256, gamma=1.0, offset=2.0).kernel_size == 11
    assert sum(x.numel() for x in vision.ECA(256).parameters()) == 5
    with pytest.raises(ValueError, match="ECA: kernel_size must be odd, so that it has a centre; got 4"):
        vision.ECA(8, 4)
