"""Functions of scores keep the laws, on every kernel that calls them."""

from functools import partial
from typing import Any

import pytest
import torch
from tests.sampled import sampled
from torch import Tensor, nn

import saccade as sc
from saccade import testing
from saccade.positions import ALiBi
from saccade.scores import Additive, Modified
from saccade.testing import definitions, shared_masks
from saccade.testing.case import Case, seeded
from saccade.testing.cases import EVICTED, RAGGED


class Fading(nn.Module):
    """Scores that fade with distance, each side at a rate of its own, as a function of scores."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = nn.Parameter(torch.tensor([0.3, -0.2]))

    def forward(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        distance = (q - kv).to(score.dtype)
        rate = torch.where(q >= kv, self.rates[0], self.rates[1]).to(score.dtype)
        return score * torch.sigmoid(rate * distance) + torch.sin(score)


def _faded(function: Any, scores: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    past, future = function.rates.double()
    back, ahead = (kv <= q).double() * (q - kv), (kv > q).double() * (q - kv)
    return scores / (1 + torch.exp(-past * back - future * ahead)) + scores.sin()


definitions.define(Fading, _faded)

CASES = (
    Case("modified", *shared_masks.CAUSAL, score=Modified(Fading())),
    Case(
        "modified-extend",
        *shared_masks.window(2, 1),
        q_len=3,
        kv_len=9,
        score=Modified(Fading()),
        softcap=1.5,
        scale=0.7,
    ),
    Case(
        "modified-evicted-cache",
        *shared_masks.CAUSAL,
        score=Modified(Fading()),
        relative=ALiBi(4),
        sink=True,
        **EVICTED,
    ),
    Case("modified-ragged", *shared_masks.CAUSAL, score=Modified(Fading()), bias=(2, 4, 3, 5), **RAGGED),
    Case(
        "modified-twice",
        *shared_masks.window(1, 1),
        q_len=9,
        kv_len=4,
        key_dim=5,
        score=Modified(Fading(), Modified(Fading(), seeded(lambda: Additive(8, 5, 4)))),
    ),
)
LARGE = (
    Case(
        "large-modified-streaming", *shared_masks.streaming(70, 0, 300), score=Modified(Fading()), **shared_masks.LARGE
    ),
)
GENERAL = [law for law in testing.LAWS if law.cases is None and law.dtypes is None]
OFFERS = ["bias", "scale", "softcap", "dropout_p", "sink_logit", "score", "relative", "q_positions", "kv_positions"]


@pytest.mark.ci
@pytest.mark.parametrize("impl", sampled(["tiled", "auto", "reference"], 3))
@pytest.mark.parametrize("dtype", sampled([torch.float32, torch.float64], 2), ids=["float32", "float64"])
def test_the_laws_are_kept(impl: str, dtype: torch.dtype) -> None:
    report = testing.check(
        partial(sc.attention, impl=impl),
        with_lse=partial(sc.attention_with_lse, impl=impl),
        offers=OFFERS,
        masks="objects",
        cases=CASES,
        laws=GENERAL,
        dtypes=[dtype],
        seed=0,
    )
    assert report.raise_if_broken().ok
    assert len(report.kept) > 100


def test_the_oracle_is_kept_where_there_are_several_tiles() -> None:
    laws = [law for law in GENERAL if law.name in {"oracle", "gradients_of_inputs", "gradients_of_parameters"}]
    options: dict[str, Any] = {"offers": OFFERS, "masks": "objects", "cases": LARGE, "laws": laws}
    report = testing.check(partial(sc.attention, impl="tiled"), dtypes=[torch.float64], **options, seed=0)
    assert report.raise_if_broken().ok
