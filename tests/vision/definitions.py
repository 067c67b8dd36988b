"""The papers' formulas in float64 with explicit loops and dense matrices, and timm's names of the parameters."""

import torch
from torch import Tensor
from torch.nn import functional as F


def conv1x1(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = torch.einsum("oc,bchw->bohw", weight.reshape(weight.shape[0], -1), x)
    return y if bias is None else y + bias[:, None, None]


def batch_norm(x: Tensor, state: dict[str, Tensor], prefix: str, eps: float = 1e-5) -> Tensor:
    """With the running statistics, as in evaluation."""
    mean, var, weight, bias = (state[prefix + n] for n in ("running_mean", "running_var", "weight", "bias"))
    shape = (1, -1, 1, 1)
    return (x - mean.view(shape)) / (var.view(shape) + eps).sqrt() * weight.view(shape) + bias.view(shape)


def channel_gate(x: Tensor, state: dict[str, Tensor], *, with_max: bool) -> Tensor:
    """Squeeze-and-excitation, and CBAM's channel gate where ``with_max``; parameters under timm's names."""

    def mlp(z: Tensor) -> Tensor:
        hidden = conv1x1(z, state["fc1.weight"], state.get("fc1.bias")).clamp(min=0)
        return conv1x1(hidden, state["fc2.weight"], state.get("fc2.bias"))

    batch, channels, height, width = x.shape
    positions = x.reshape(batch, channels, height * width)
    logits = mlp((positions.sum(2) / (height * width))[:, :, None, None])
    if with_max:
        logits = logits + mlp(positions.max(2).values[:, :, None, None])
    return 1 / (1 + (-logits).exp())


def eca_gate(x: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Efficient channel attention, channel by channel, as a product with a band matrix."""
    batch, channels, height, width = x.shape
    means = x.reshape(batch, channels, -1).sum(2) / (height * width)
    kernel = state["conv.weight"].flatten()
    reach = len(kernel) // 2
    band = torch.zeros(channels, channels, dtype=x.dtype)
    for c in range(channels):
        for other in range(max(0, c - reach), min(channels, c + reach + 1)):
            band[c, other] = kernel[other - c + reach]
    return 1 / (1 + (-(means @ band.T)[:, :, None, None]).exp())


def spatial_gate(x: Tensor, state: dict[str, Tensor]) -> Tensor:
    """CBAM's spatial gate, the convolution as a loop over its taps; parameters under timm's names."""
    batch, channels, height, width = x.shape
    maps = torch.stack([x.sum(1) / channels, x.max(1).values], 1)
    kernel = state["conv.conv.weight"]
    reach = kernel.shape[2] // 2
    padded = F.pad(maps, (reach,) * 4)
    logits = torch.zeros(batch, 1, height, width, dtype=x.dtype)
    for dy in range(kernel.shape[2]):
        for dx in range(kernel.shape[3]):
            window = padded[:, :, dy : dy + height, dx : dx + width]
            logits += (kernel[0, :, dy, dx][None, :, None, None] * window).sum(1, keepdim=True)
    if "conv.bn.weight" in state:
        logits = batch_norm(logits, state, "conv.bn.")
    return 1 / (1 + (-logits).exp())


def cbam(x: Tensor, state: dict[str, Tensor], *, channels_first: bool = True) -> Tensor:
    """Apply both gates in order; parameters have timm's names."""
    parts = [
        {n.split(".", 1)[1]: p for n, p in state.items() if n.startswith(which)} for which in ("channel", "spatial")
    ]
    gates = [lambda x: channel_gate(x, parts[0], with_max=True), lambda x: spatial_gate(x, parts[1])]
    for gate in gates if channels_first else reversed(gates):
        x = x * gate(x)
    return x


def bam_gate(x: Tensor, state: dict[str, Tensor], dilation: int) -> Tensor:
    """Park et al., equations 2 to 4, with ReLUs between the convolutions; parameters under our names."""
    pooled = x.mean((2, 3))
    hidden = (pooled @ state["reduce.weight"].T + state["reduce.bias"]).clamp(min=0)
    channel = (hidden @ state["expand.weight"].T + state["expand.bias"])[:, :, None, None]
    y = conv1x1(x, state["convs.0.weight"], state["convs.0.bias"]).clamp(min=0)
    for layer in ("convs.2", "convs.4"):
        weight, padded, own = state[f"{layer}.weight"], F.pad(y, (dilation,) * 4), 0
        for dy in range(3):
            for dx in range(3):
                rows = slice(dy * dilation, dy * dilation + x.shape[2])
                window = padded[:, :, rows, dx * dilation : dx * dilation + x.shape[3]]
                own = own + conv1x1(window, weight[:, :, dy, dx])
        y = (own + state[f"{layer}.bias"][:, None, None]).clamp(min=0)
    spatial = conv1x1(y, state["convs.6.weight"], state["convs.6.bias"])
    logits = batch_norm(channel, state, "channel_norm.") + batch_norm(spatial, state, "spatial_norm.")
    return 1 / (1 + (-logits).exp())


def non_local(x: Tensor, state: dict[str, Tensor], *, kind: str, subsample: int = 1, scale: float = 1.0) -> Tensor:
    """Wang et al., equations 1 to 7, pair by pair; parameters under timm's names, and ``joint`` for w."""
    context = F.max_pool2d(x, subsample, ceil_mode=True) if subsample > 1 else x

    def tokens(y: Tensor) -> Tensor:
        return y.flatten(2).transpose(1, 2)

    def projected(y: Tensor, name: str) -> Tensor:
        return tokens(conv1x1(y, state[f"{name}.weight"], state[f"{name}.bias"]))

    g = projected(context, "g")
    theta, phi = (tokens(x), tokens(context)) if kind == "gaussian" else (projected(x, "t"), projected(context, "p"))
    y = torch.zeros(x.shape[0], theta.shape[1], g.shape[2], dtype=x.dtype)
    for b in range(x.shape[0]):
        for i in range(theta.shape[1]):
            if kind == "concatenation":
                w = state["joint"].flatten()
                pairs = torch.cat([theta[b, i].expand_as(phi[b]), phi[b]], 1)
                f = (pairs @ w).clamp(min=0) / phi.shape[1]
            else:
                f = phi[b] @ theta[b, i] * scale
                f = f / phi.shape[1] if kind == "dot" else f.exp() / f.exp().sum()
            y[b, i] = f @ g[b]
    y = y.transpose(1, 2).reshape(x.shape[0], -1, *x.shape[2:])
    return x + batch_norm(conv1x1(y, state["z.weight"], state["z.bias"]), state, "norm.")


def position(x: Tensor, state: dict[str, Tensor]) -> Tensor:
    """Self-attention over positions as a dense matrix; parameters under our names."""
    q, k, v = (conv1x1(x, state[f"{n}.weight"], state[f"{n}.bias"]).flatten(2) for n in ("query", "key", "value"))
    scores = (q.transpose(1, 2) @ k).exp()
    attended = v @ (scores / scores.sum(2, keepdim=True)).transpose(1, 2)
    return x + state["gamma"] * attended.reshape(x.shape)
