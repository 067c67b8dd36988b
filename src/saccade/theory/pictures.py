"""Figures for the theory pages of the documentation, one per page. They need matplotlib, imported on first use."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from saccade.masks import Window
from saccade.matrix import AttentionMatrix, attention
from saccade.scores import Gaussian
from saccade.theory.claim import Draw
from saccade.theory.common_mistakes import MISTAKES
from saccade.theory.complexity import dense, flops, recurrence
from saccade.theory.features import variance_of_positive, variance_of_trigonometric
from saccade.theory.information import gaussian_information, patterns
from saccade.theory.paths import attending, convolutions, influence, lstm
from saccade.theory.rank import weights_of
from saccade.theory.related_methods import kalman_update
from saccade.theory.scaling import inverse_root, sensitivity
from saccade.theory.softmax import jacobian, jacobian_as_printed
from saccade.theory.trained_layers import attentive, learned, neighbours, recall
from saccade.theory.trained_models import TEXTS, ShareOfKeys, decoder_loss
from saccade.viz.canvas import DPI, GREY, INK, INKS, blank, colours

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PURPLE, _RED, _GREEN, _GREY, _FILLED = *INKS[:3], GREY, "#efe9f4"


def scaling() -> Figure:
    """Draw how sensitive the weights are to the scores as d_k grows, with and without the scale."""
    draw, widths = Draw(0, "scaling"), [2**power for power in range(1, 12)]
    medians_and_means = []
    for width in widths:
        scores = draw.normal(800, width).norm(dim=-1, keepdim=True) * draw.normal(800, 16)
        plain, scaled = sensitivity(scores), sensitivity(scores * inverse_root(width))
        medians_and_means.append([float(x) for x in (scaled.median(), plain.mean(), plain.median())])
    figure, (axes,) = side_by_side(1, 4.6)
    columns = list(zip(*medians_and_means, strict=True))
    styles = (("scaled, median", _GREEN, "-"), ("not scaled, mean", _RED, "-"), ("not scaled, median", _PURPLE, "-"))
    for (label, colour, style), column in zip(styles, columns, strict=True):
        axes.plot(widths, column, color=colour, linestyle=style, marker="o", markersize=3, label=label)
    axes.plot(widths, [2 / math.sqrt(width) for width in widths], color=_GREY, linestyle=":", label="2/√d_k")
    axes.set(xscale="log", yscale="log", xlabel="d_k", ylabel="1 - |p|²", ylim=(1e-7, 2))
    head(axes, "What is left of softmax's gradient, 16 keys")
    legend(axes)
    return figure


def softmax() -> Figure:
    """Draw the Jacobian of a softmax row, next to the wrong Jacobian that tutorials print."""
    weights = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0], dtype=torch.float64).softmax(0)
    right, printed = jacobian(weights), jacobian_as_printed(weights[None])[0, :, 0]
    figure, panels = side_by_side(2, 2.6)
    for axes, matrix, title in zip(
        panels, (right, printed), ("right: δ_ik A_ij (δ_jl - A_il)", "as printed: A_ij (δ_ik - A_kj)"), strict=True
    ):
        image = axes.imshow(matrix.numpy(), cmap="PuOr_r", vmin=-0.4, vmax=0.4)
        axes.set(xlabel="score l", ylabel="weight j", xticks=range(5), yticks=range(5))
        head(axes, title, 9)
        for j in range(5):
            for k in range(5):
                axes.text(k, j, f"{matrix[j, k]:.2f}", ha="center", va="center", size=7, color=INK)
    figure.colorbar(image, ax=panels, shrink=0.8).ax.tick_params(labelsize=7)
    return figure


def averages() -> Figure:
    """Draw values with their convex hull, outputs inside the hull, and outputs after dropout."""
    draw, n = Draw(3, "averages"), 9
    value = draw.normal(1, 1, n, 2)
    matrix = AttentionMatrix(2 * draw.normal(1, 1, 40, 2), value)
    inside, dropped = (matrix @ value)[0, 0], matrix.matmul(value, dropout_p=0.5, seed=1)[0, 0]
    figure, (axes,) = side_by_side(1, 5.0)
    turn = torch.linspace(0, 2 * math.pi, 2000, dtype=torch.float64)
    furthest = (torch.stack([turn.cos(), turn.sin()], 1) @ value[0, 0].T).argmax(1)
    axes.fill(*value[0, 0, furthest].T.numpy(), color=_FILLED, zorder=0)
    for points, colour, mark, label in (
        (value[0, 0].numpy(), INK, "s", "values"),
        (inside.numpy(), _PURPLE, "o", "outputs"),
        (dropped.numpy(), _RED, "x", "outputs with dropout 0.5"),
    ):
        axes.scatter(points[:, 0], points[:, 1], s=16, color=colour, marker=mark, label=label, linewidth=1)
    head(axes, "Outputs lie in the hull of the values")
    legend(axes, loc="upper left", bbox_to_anchor=(1, 1))
    axes.set_aspect("equal")
    return figure


def matrices() -> Figure:
    """Draw the singular values of scores and weights, and the eigenvalues of three kinds of weights."""
    draw = Draw(0, "matrices")
    q, k = draw.normal(64, 8), draw.normal(64, 8)
    figure, (left, right) = side_by_side(2, 3.0)
    for matrix, colour, label in (
        (q @ k.T / 8**0.5, _RED, "QKᵀ/√d_k, rank 8"),
        (weights_of(q, k), _PURPLE, "A, rank 64"),
    ):
        values = torch.linalg.svdvals(matrix).clamp_min(1e-17).numpy()
        left.semilogy(range(1, 65), values, ".", color=colour, label=label)
    left.set(xlabel="number", ylabel="singular value")
    head(left, "Softmax does not keep rank")
    legend(left)
    values = torch.linalg.eigvals(weights_of(3 * q, k)).numpy()
    turn = torch.linspace(0, 2 * math.pi, 200)
    right.plot(turn.cos().numpy(), turn.sin().numpy(), color=_GREY, linewidth=0.8)
    right.scatter(values.real, values.imag, s=9, color=_PURPLE, label="random weights", zorder=2)
    ring: dict[str, Any] = {"s": 60, "facecolors": "none", "edgecolors": _RED}
    right.scatter([1, 0], [0, 0], label="a sink; uniform weights", zorder=3, **ring)
    right.set_aspect("equal")
    right.set(xlim=(-1.15, 1.15), ylim=(-1.6, 1.15), xlabel="real part", ylabel="imaginary part")
    head(right, "Eigenvalues")
    legend(right, loc="lower left")
    return figure


def inference() -> Figure:
    """Draw mean shift by attention, and the information that three patterns of weights transmit."""
    draw = Draw(1, "inference")
    centres = torch.tensor([[-2.0, -1.0], [2.0, -1.2], [0.2, 2.0]], dtype=torch.float64)
    keys = (centres[:, None] + 0.6 * draw.normal(3, 25, 2)).flatten(0, 1)
    at = 6 * draw.uniform(18, 2) - 3
    score, path = Gaussian(0.8).double(), [at]
    for _ in range(25):
        at = attention(at[None, None], keys[None, None], keys[None, None], score=score)[0, 0]
        path.append(at)
    figure, (left, right) = side_by_side(2, 3.0)
    left.scatter(keys[:, 0].numpy(), keys[:, 1].numpy(), s=5, color=_GREY)
    for points in torch.stack(path, 1).numpy():
        left.plot(points[:, 0], points[:, 1], color=_PURPLE, linewidth=0.8)
        left.scatter(points[-1, :1], points[-1, 1:], s=22, color=_RED, zorder=3)
    left.set_aspect("equal")
    head(left, "Attention to keys as values climbs their density", 9)
    for row, weights in enumerate(patterns(16).values()):
        entropy, passed = float(torch.special.entr(weights).sum(-1).mean()), gaussian_information(weights, 0.01)
        for shift, nats, colour, what in (
            (-0.18, passed, _PURPLE, "information"),
            (0.18, entropy, _RED, "entropy of a row"),
        ):
            label = None if row else f"{what}, nats"
            right.barh([row + shift], [nats], height=0.34, color=colour, label=label)
            right.text(nats + 0.6, row + shift, f"{nats:.1f}", va="center", size=8, color=INK)
    right.set_yticks(range(3), ["one key each", "a sink", "uniform"])
    right.set_xlim(0, 44)
    right.invert_yaxis()
    head(right, "Together, sparse rows can tell the most", 9)
    legend(right, loc="lower right")
    return figure


def relatives() -> Figure:
    """Draw a Kalman update, which need not be an average of prediction and observation."""
    prior_cov = torch.tensor([[1.0, 0.9], [0.9, 1.0]], dtype=torch.float64)
    noise_cov = torch.tensor([0.1, 5.0], dtype=torch.float64).diag()
    prior, seen = torch.zeros(2, dtype=torch.float64), torch.tensor([1.0, -1.0], dtype=torch.float64)
    after = kalman_update(prior, prior_cov, seen, noise_cov)
    figure, (axes,) = side_by_side(1, 5.0)
    axes.fill([0, 1, 1, 0], [-1, -1, 0, 0], facecolor=_FILLED, edgecolor="none")
    turn = torch.linspace(0, 2 * math.pi, 200, dtype=torch.float64)
    circle = torch.stack([turn.cos(), turn.sin()])
    for mean, cov, colour, name in ((prior, prior_cov, _GREY, "prediction"), (seen, noise_cov, _RED, "observation")):
        ring = (mean[:, None] + torch.linalg.cholesky(cov) @ circle).numpy()
        axes.plot(ring[0], ring[1], color=colour, linewidth=1)
        axes.scatter(mean[:1].numpy(), mean[1:].numpy(), color=colour, s=24, label=name)
    label = f"update ({after[0]:.2f}, {after[1]:.2f})"
    axes.scatter(after[:1].numpy(), after[1:].numpy(), color=_PURPLE, s=36, marker="D", label=label)
    axes.set(xlim=(-1.6, 2.2), ylim=(-2.0, 1.7))
    axes.set_aspect("equal")
    head(axes, "An update outside of the box that averages stay in", 9)
    legend(axes, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def trained() -> Figure:
    """Draw the accuracy of trained layers by number of heads, and a decoder's loss by the share of keys read."""
    figure, (left, right) = side_by_side(2, 3.4)
    cases = (
        ("both neighbours", neighbours(1, 2), 32, 0.01, 200),
        ("one of 16 keys", recall(), 16, 0.03, 400),
    )
    counts = (1, 2, 4, 8)
    for shift, colour, (label, task, width, rate, steps) in zip((-0.2, 0.2), INKS[:2], cases, strict=True):
        runs = [learned(attentive(heads), task, width=width, rate=rate, steps=steps) for heads in counts]
        accuracies = [float(run.accuracy.mean()) for run in runs]
        centres = [index + shift for index in range(len(counts))]
        left.bar(centres, accuracies, width=0.38, color=colour, label=label)
        for centre, accuracy in zip(centres, accuracies, strict=True):
            left.text(centre, accuracy + 0.02, f"{accuracy:.0%}", ha="center", size=7, color=INK)
    left.set_xticks(range(len(counts)), [str(heads) for heads in counts])
    left.set(xlabel="heads, of the same total width", ylabel="accuracy", ylim=(0, 1.35), yticks=(0, 0.5, 1))
    head(left, "Which is better depends on the task", 9)
    legend(left, loc="upper left", ncols=2)
    whole, shares = torch.tensor([decoder_loss(text) for text in TEXTS]), (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)
    for label, at_random, colour in (("drawn at random", True, INKS[1]), ("the strongest", False, INKS[0])):
        lost = torch.stack(
            [
                torch.tensor(
                    [decoder_loss(text, partial(ShareOfKeys, share=share, at_random=at_random)) for text in TEXTS]
                )
                for share in shares
            ]
        )
        right.plot(shares, (lost - whole).mean(1), color=colour, marker="o", markersize=3, label=label)
        right.fill_between(shares, *(lost - whole).aminmax(dim=1), color=colour, alpha=0.15, linewidth=0)
    right.set(xscale="log", xlabel="share of its keys that a query reads", ylabel="nats a token lost")
    right.set_xticks(shares, ["1/16", "1/8", "1/4", "1/2", "3/4", "1"])
    right.minorticks_off()
    head(right, "A decoder needs half of its keys, three texts", 9)
    legend(right)
    return figure


def cost() -> Figure:
    """Draw the number of operations by sequence length, and the influence of a token by its distance."""
    figure, (left, right) = side_by_side(2, 3.0)
    lengths, width = [2**power for power in range(4, 14)], 64

    def meta(length: int) -> Tensor:
        return torch.empty(1, 1, length, width, device="meta")

    steps = flops(lambda: recurrence(meta(16))) / 16
    counted: dict[str, Callable[[int], float]] = {
        "attention": lambda n: flops(lambda: dense(meta(n), meta(n), meta(n))),
        "window of 256": lambda n: AttentionMatrix(meta(n), meta(n), Window(255, 0)).explain().flops,
        "recurrence": lambda n: n * steps,
    }
    for (name, count), colour in zip(counted.items(), (_PURPLE, _RED, _GREEN), strict=True):
        left.plot(lengths, [count(n) for n in lengths], color=colour, marker="o", markersize=2.5, label=name)
    left.axvline(width, color=_GREY, linestyle=":", linewidth=1)
    left.set(xscale="log", yscale="log", xlabel="n (dotted: n = d = 64)", ylabel="operations in matrix products")
    head(left, "Counted operations")
    legend(left)
    draw = Draw(0, "cost")
    attend, x = attending(draw), draw.normal(32, 65, 16)
    layers = {
        "attention": attend,
        "LSTM": lstm(draw),
        "LSTM, forget bias 6": lstm(draw, 6.0),
        "4 convolutions": convolutions(draw, 4),
    }
    for (name, layer), colour in zip(layers.items(), (_PURPLE, _GREEN, _GREY, _RED), strict=True):
        strength = influence(layer, x).mean(0).numpy()
        shown = strength[strength > 0]
        right.plot(range(len(shown)), shown / shown[1], color=colour, label=name)
    right.set(yscale="log", xlabel="distance", ylabel="influence, against distance 1", ylim=(1e-14, 50))
    head(right, "Influence on the last output")
    legend(right)
    return figure


def features() -> Figure:
    """Draw the errors of two kinds of random features as functions of the angle between query and key."""
    figure, (axes,) = side_by_side(1, 4.6)
    angles = torch.linspace(0, math.pi, 91, dtype=torch.float64)
    x = torch.tensor([0.7, 0.0], dtype=torch.float64)
    other = 0.7 * torch.stack([angles.cos(), angles.sin()], 1)
    for name, variance, colour in (
        ("positive", variance_of_positive, _PURPLE),
        ("trigonometric", variance_of_trigonometric, _RED),
    ):
        relative = [float(variance(x, y).sqrt() / (x @ y).exp()) for y in other]
        axes.plot(angles.rad2deg().numpy(), relative, color=colour, label=name)
    axes.set(xlabel="angle of query and key, degrees", xticks=range(0, 181, 45))
    axes.set_ylabel("error of one feature, relative to the kernel")
    head(axes, "Neither kind of feature is always better; |x| = |y| = 0.7", 9)
    legend(axes)
    return figure


def mistakes() -> Figure:
    """Draw the weights that each common mistake produces, next to the correct weights."""
    draw, n, tokens = Draw(0, "mistakes"), 7, 4
    q, k = 1.5 * draw.normal(1, 1, n, 4), 1.5 * draw.normal(1, 1, n, 4)
    causal, eye = torch.ones(1, 1, n, n, dtype=torch.bool).tril(), torch.eye(n, dtype=torch.float64)[None, None]
    padded = (torch.arange(n) < torch.tensor([[n], [tokens]]))[:, None, None]  # two sequences; the second is shorter
    diagonal = [(x - 0.5, y - 0.5) for y in range(n + 1) for x in (y, y + 1)][1:-1]
    steps = {"wrong mask": [(tokens - 0.5, -0.5), (tokens - 0.5, n - 0.5)]}
    shown = {"right": attention(q, k, eye, causal)}
    for mistake in MISTAKES[:4]:
        allowed = padded.expand(2, 1, n, n) if mistake.name in steps else causal
        shown[mistake.name] = mistake.function(q, k, eye, allowed)[-1:]
    figure, panels = side_by_side(5, 1.7)
    for axes, (name, matrix) in zip(panels, shown.items(), strict=True):
        image = axes.imshow(matrix[0, 0].numpy(), cmap=colours(), vmin=0, vmax=1)
        axes.plot(*zip(*steps.get(name, diagonal), strict=True), color=_GREEN, linewidth=1.2)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set(visible=True, color=GREY, linewidth=0.6)
        head(axes, name, 8.5)
    panels[0].set(xlabel="key", ylabel="query")
    panels[1].set_xlabel("right of the line: hidden", color=_GREEN)
    figure.colorbar(image, ax=panels, shrink=0.75, aspect=12, pad=0.01).ax.tick_params(labelsize=7)
    return figure


def side_by_side(count: int, width: float) -> tuple[Figure, tuple[Axes, ...]]:
    """Create a figure for a theory page with ``count`` panels side by side, each about ``width`` inches wide."""
    canvas = blank()
    figure = canvas.figure
    figure.clear()
    figure.set_size_inches(width * count + 0.8, min(width, 3.0) + 0.6)
    figure.set_layout_engine("constrained")
    panels = tuple(figure.add_subplot(1, count, number + 1) for number in range(count))
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8, color=INK, labelcolor=INK)
        axes.xaxis.label.set(size=8, color=INK)
        axes.yaxis.label.set(size=8, color=INK)
    assert figure.dpi == DPI, "blank() sets it"
    return figure, panels


def head(axes: Axes, title: str, size: float = 10) -> None:
    """Set the left-aligned title of a figure's panel."""
    axes.set_title(title, loc="left", size=size, color=INK)


def legend(axes: Axes, **options: Any) -> None:
    """Add a legend to a figure's panel."""
    axes.legend(frameon=False, fontsize=8, **options)


PICTURES: dict[str, Callable[[], Figure]] = {
    f"theory-{picture.__name__}": picture
    for picture in (scaling, softmax, averages, matrices, inference, relatives, trained, cost, features, mistakes)
}
"""The functions that draw the figures, by the name of the page that shows each figure."""
