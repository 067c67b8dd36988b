"""Performer: softmax attention estimated by random features."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from saccade.mechanisms.checked_mechanism import scale_of
from saccade.mechanisms.features.feature_matrix import FeatureMechanism, Features
from saccade.mechanisms.features.random_features import KINDS, Kind, drawn, drawn_at_run_time, random_features
from saccade.mechanisms.readable_tensors import is_readable
from saccade.support.errors import unsupported, value_error
from saccade.support.torch_modes import unobserved, without_autocast
from saccade.support.validation import check_bool, check_choice, check_int, check_number, check_type, register_tensor


class Performer(FeatureMechanism):
    r"""Softmax attention in linear time, estimated from random features (FAVOR+).

    .. math:: e^{q \cdot k} = E_\omega[\phi_\omega(q) \cdot \phi_\omega(k)], \qquad
              A_{ij} = \frac{\phi(q_i) \cdot \phi(k_j)}{\sum_{j'} \phi(q_i) \cdot \phi(k_{j'})}

    The estimate of the kernel is unbiased. The estimate of a row is a quotient and has a bias of O(1 / num_features).
    The error falls as ``num_features ** -0.5``, so the result converges to exact attention. The number of features
    needed grows as :math:`e^{|q + k|^2}`, with q and k scaled by the square root of ``scale``, so queries and keys
    should have small norms. `saccade.compare` measures the error on your tensors.

    To avoid overflow, each token's features are divided by their largest value. For a query, this factor cancels. For a
    key, it is stored as a weight of the key, and each row is divided by the largest weight among the keys that it may
    attend to. So a key never affects a row that cannot attend to it, not even through rounding. No other stabilising
    term is added.

    All heads use the same random directions, which depend on ``seed`` and the number of draws so far. The state dict
    contains this number and the number of calls since the last draw, so resumed training draws new directions when the
    original run would have.

    Args:
        num_features: number of random directions, 256 when None. The "hyperbolic" and "trigonometric" kinds compute two
            features from each.
        orthogonal: True for directions that are perpendicular to one another in blocks of head_dim, which lowers the
            variance; False for independent directions.
        kind: "positive" features are best for small weights. "hyperbolic" features are also positive, and have less
            than half the variance at twice the cost. "trigonometric" features are best for similar queries and keys,
            but can give weights below 0.
        scale: scale of the dot products; ``head_dim ** -0.5`` when None.
        seed: seed of the random directions.
        redraw: number of training calls after which new directions are drawn; None to keep the first directions.
        directions: the directions to use, ``[num_features, head_dim]``, such as the ``projection_matrix`` of a
            checkpoint. They are part of the state dict, and receive a gradient if they require one. When None, the
            directions are random.

    Raises:
        TypeError, ValueError: a count below 1, an unknown kind, or a scale that is not a finite number.
        UnsupportedError: any mask except Causal, Documents, masks that depend only on keys (Padding), and combinations
            of these with ``&``.

    Cost: O(n * num_features * (head_dim + value_dim)) time and O(n * num_features) memory; see `FeatureMatrix`.

    Example:
        >>> import torch, saccade as sc
        >>> _ = torch.manual_seed(0)
        >>> query, key, value = (torch.randn(1, 2, 100, 16) / 2 for _ in range(3))
        >>> exact = sc.attention(query, key, value)
        >>> for num_features in (16, 256, 4096):
        ...     error = (Performer(num_features)(query, key) @ value - exact).norm() / exact.norm()
        ...     print(f"{num_features:4d} features: {error:.0%}")
          16 features: 31%
         256 features: 11%
        4096 features: 3%

    Reference: Choromanski et al. 2021, arXiv:2009.14794.
    """

    directions: Tensor | None
    draws: Tensor
    calls: Tensor

    def __init__(
        self,
        num_features: int | None = None,
        *,
        orthogonal: bool = True,
        kind: Kind = "positive",
        scale: float | None = None,
        seed: int = 0,
        redraw: int | None = None,
        directions: Tensor | None = None,
    ):
        super().__init__()
        checked = None if directions is None else _checked_directions(directions, num_features, redraw)
        register_tensor(self, "directions", checked, torch.float64)
        count = 256 if num_features is None else num_features
        self.num_features = check_int("num_features", count) if checked is None else len(checked)
        self.orthogonal = check_bool("orthogonal", orthogonal)
        self.kind = check_choice("kind", kind, KINDS)
        self.scale = None if scale is None else check_number("scale", scale)
        self.seed = check_int("seed", seed, 0)
        self.redraw = None if redraw is None else check_int("redraw", redraw)
        self.register_buffer("draws", torch.zeros((), dtype=torch.int64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self._drawn: tuple[tuple[int, int], Tensor] | None = None

    def draw(self) -> None:
        """Draw new random directions for later calls. Existing states and matrices do not change.

        Raises:
            UnsupportedError: the directions were passed by the caller.
        """
        if self.directions is not None:
            raise unsupported("directions", ["they were passed by the caller and are not random"])
        self.draws += 1
        self.calls.zero_()

    def projection(self, head_dim: int) -> Tensor:
        """Return the random directions for this head width, ``[num_features, head_dim]``; float64 if drawn."""
        if self.directions is not None:
            if self.directions.shape[1] != head_dim:
                rule = f"have shape [num_features, {head_dim}], the width of queries and keys"
                raise value_error("directions", rule, list(self.directions.shape))
            return self.directions
        if not is_readable(self.draws):
            return drawn_at_run_time(self.seed, self.draws, self.num_features, head_dim, orthogonal=self.orthogonal)
        which = (int(self.draws), head_dim)
        if self._drawn is None or self._drawn[0] != which:
            with unobserved():
                directions = drawn(self.seed, which[0], self.num_features, head_dim, orthogonal=self.orthogonal)
            self._drawn = (which, directions)
        return self._drawn[1]

    def features(self, query: Tensor, key: Tensor) -> tuple[Features, Features, Hashable]:
        if self.training and self.redraw is not None:
            # Count in tensors, so that a traced program also counts.
            is_due = self.calls == self.redraw
            self.draws += is_due
            self.calls.mul_(~is_due).add_(1)
        scale = scale_of(self.scale, query.shape[3])
        root = math.sqrt(abs(scale))
        with without_autocast(query.device):
            projection = self.projection(query.shape[3]).to(query.device, query.dtype)
            of_query = random_features(query * math.copysign(root, scale), projection, self.kind)
            of_key = random_features(key * root, projection, self.kind)
        return of_query, of_key, (*self._source(), self.num_features, self.kind, scale)

    def _source(self) -> tuple[Hashable, ...]:
        """Return an identifier of the random directions. It is less specific if their values cannot be read."""
        if self.directions is None:
            return self.seed, int(self.draws) if is_readable(self.draws) else None, self.orthogonal
        if not is_readable(self.directions):
            return (None,)
        numbers = self.directions.detach().to("cpu", torch.float64).contiguous().numpy()
        return (hashlib.sha256(numbers.tobytes()).hexdigest(),)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        # State dicts of older versions have no number of calls, so counting starts at 0.
        if f"{prefix}draws" in state_dict:
            state_dict.setdefault(f"{prefix}calls", torch.zeros((), dtype=torch.int64))
        super()._load_from_state_dict(state_dict, prefix, *others)

    def extra_repr(self) -> str:
        defaults = [("orthogonal", True), ("kind", "positive"), ("scale", None), ("seed", 0), ("redraw", None)]
        changed = [f"{name}={getattr(self, name)!r}" for name, usual in defaults if getattr(self, name) != usual]
        changed += [] if self.directions is None else ["directions given"]
        return ", ".join([str(self.num_features), *changed])


def _checked_directions(directions: object, num_features: int | None, redraw: int | None) -> Tensor:
    """Return the directions that the caller passed, after checking that they are valid and fit the other arguments."""
    given = check_type("directions", directions, Tensor, "be a float tensor [num_features, head_dim] or None")
    if given.dim() != 2 or not given.is_floating_point() or not len(given):
        rule = "be a float tensor of shape [num_features, head_dim]"
        got = f"{str(given.dtype).removeprefix('torch.')} {list(given.shape)}"
        raise value_error("directions", rule, got)
    if num_features not in (None, len(given)):
        raise value_error("num_features", f"be {len(given)}, the number of directions, or None", num_features)
    if redraw is not None:
        raise value_error("redraw", "be None when directions are given", redraw)
    return given
