"""The inputs that kernels are asked about, each beside query and key."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from answers.examples import WIDTH
from saccade import positions, scores


class Input(NamedTuple):
    """A possible input beside query and key, with its name in both languages."""

    en: str
    zh: str
    given: dict[str, Any] = {}
    dropout_p: float = 0.0
    dtype: torch.dtype | None = None
    needs_lse: bool = False
    forwards: bool = False


def inputs() -> list[Input]:
    """Return all inputs, for two heads of `WIDTH` and 64 tokens."""
    bias, table = torch.zeros(1, 2, 64, 64), positions.T5(2)
    return [
        Input("gradients", "梯度"),
        Input("the lse, and its gradient", "lse 及其梯度", needs_lse=True),
        Input("a sink logit", "汇点 `sink_logit`", {"sink_logit": torch.zeros(2)}),
        Input("a softcap", "`softcap`", {"softcap": 30.0}),
        Input("dropout", "dropout", dropout_p=0.1),
        Input("a bias in a tensor", "张量形式的偏置", {"bias": bias}),
        Input("the same, trained", "同上，要训练", {"bias": bias.clone().requires_grad_()}),
        Input("a bias by distance, `ALiBi`", "按距离的偏置 `ALiBi`", {"bias": positions.ALiBi(2)}),
        Input("the same, trained, `T5`", "按距离、要训练的偏置 `T5`", {"bias": table}),
        Input("`Bilinear`, `Cosine`, `Gaussian`", "`Bilinear`、`Cosine`、`Gaussian`", {"score": scores.Gaussian()}),
        Input("`Additive`", "`Additive`", {"score": scores.Additive(WIDTH, WIDTH, 32)}),
        Input("a function of scores", "改变得分的函数", {"score": lambda score, b, h, q, kv: score}),
        Input("positions in a table", "表格形式的位置", {"q_positions": torch.arange(64), "kv_positions": range(64)}),
        Input("float64", "float64", dtype=torch.float64),
        Input("float32", "float32", dtype=torch.float32),
        Input("bfloat16", "bfloat16", dtype=torch.bfloat16),
        Input("float16", "float16", dtype=torch.float16),
        Input("derivatives taken forwards (`jvp`)", "前向求导（`jvp`）", forwards=True),
    ]
