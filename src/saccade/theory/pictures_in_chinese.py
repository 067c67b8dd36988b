"""The figures of the theory pages with Chinese labels, for the Chinese pages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from saccade.theory.pictures import PICTURES
from saccade.viz.fonts import drawable_title
from saccade.viz.ticks import keep_upright

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHINESE = {
    # scaling
    "What is left of softmax's gradient, 16 keys": "softmax 的梯度还剩多少，16 个键",
    "scaled, median": "缩放，中位数",
    "not scaled, mean": "不缩放，平均",
    "not scaled, median": "不缩放，中位数",
    # softmax
    "score l": "得分 l",
    "weight j": "权重 j",
    "right: δ_ik A_ij (δ_jl - A_il)": "正确：δ_ik A_ij (δ_jl - A_il)",
    "as printed: A_ij (δ_ik - A_kj)": "常被印成：A_ij (δ_ik - A_kj)",
    # averages
    "Outputs lie in the hull of the values": "输出落在值的凸包里",
    "values": "值",
    "outputs": "输出",
    "outputs with dropout 0.5": "输出，dropout 0.5",
    # matrices
    "Softmax does not keep rank": "softmax 不保持秩",
    "number": "序号",
    "singular value": "奇异值",
    "QKᵀ/√d_k, rank 8": "QKᵀ/√d_k，秩 8",
    "A, rank 64": "A，秩 64",
    "Eigenvalues": "特征值",
    "real part": "实部",
    "imaginary part": "虚部",
    "random weights": "随机权重",
    "a sink; uniform weights": "一个汇点；均匀权重",
    # inference
    "Attention to keys as values climbs their density": "以键为值的注意力，沿密度向上爬",
    "Together, sparse rows can tell the most": "合在一起，稀疏的行可以透露得最多",
    "one key each": "各看一个键",
    "a sink": "汇点",
    "uniform": "均匀",
    "information, nats": "信息（奈特）",
    "entropy of a row, nats": "一行的熵（奈特）",
    # relatives
    "An update outside of the box that averages stay in": "平均出不了方框，卡尔曼更新却能",
    "prediction": "预测",
    "observation": "观测",
    "update (0.88, 0.73)": "更新 (0.88, 0.73)",
    # trained
    "both neighbours": "两个邻居",
    "one of 16 keys": "16 个键中的一个",
    "heads, of the same total width": "头数，总宽度相同",
    "accuracy": "准确率",
    "Which is better depends on the task": "哪个更好，要看任务",
    "drawn at random": "随机抽取",
    "the strongest": "权重最大的",
    "share of its keys that a query reads": "每个查询读它的键的几分之几",
    "nats a token lost": "每个词元损失的奈特",
    "A decoder needs half of its keys, three texts": "只读一半的键，解码器损失很小，三篇文本",
    # cost
    "Counted operations": "数出的运算量",
    "n (dotted: n = d = 64)": "n（点线：n = d = 64）",
    "operations in matrix products": "矩阵乘积的运算量",
    "attention": "注意力",
    "window of 256": "窗口 256",
    "recurrence": "循环网络",
    "Influence on the last output": "对最后一个输出的影响",
    "distance": "距离",
    "influence, against distance 1": "相对于距离 1 的影响",
    "LSTM": "LSTM",
    "LSTM, forget bias 6": "LSTM，遗忘门偏置 6",
    "4 convolutions": "4 层卷积",
    # features
    "Neither kind of feature is always better; |x| = |y| = 0.7": "两种特征各有所长；|x| = |y| = 0.7",
    "angle of query and key, degrees": "查询与键的夹角，度",
    "error of one feature, relative to the kernel": "单个特征相对于核的误差",
    "positive": "正特征",
    "trigonometric": "三角特征",
    # mistakes
    "key": "键",
    "query": "查询",
    "right": "正确",
    "right of the line: hidden": "线的右边：被遮住",
    "mismatched dimensions": "维度不匹配",
    "missing scale": "忘记缩放",
    "wrong mask": "掩码用错",
    "wrong axis": "轴取错",
}
"""The labels of the figures and their Chinese translations."""


def in_chinese(draw: Callable[[], Figure], words: Mapping[str, str] | None = None) -> Figure:
    """Draw a figure of the theory pages with its labels translated into Chinese.

    Args:
        draw: the function that draws the figure.
        words: translations of complete labels, `CHINESE` if None. Other labels stay unchanged.
    """
    from matplotlib.text import Text  # noqa: PLC0415  matplotlib is optional

    words = CHINESE if words is None else words
    figure, translated = draw(), frozenset(words.values())
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        names = [label.get_text() for label in axis.get_ticklabels()]
        if any(name in words for name in names):  # ticks format their labels on every draw
            axis.set_ticks(axis.get_ticklocs(), labels=[words.get(name, name) for name in names])
    for text in figure.findobj(Text):
        own = " ".join(text.get_text().split("\n"))  # a wrapped title is one label
        shown, families = drawable_title(words[own] if own in words else text.get_text())
        if shown in translated:
            # Chinese fonts have no italics, and often no bold face.
            text.set(text=shown, fontfamily=families, fontstyle="normal", fontweight="normal")
    for axes in figure.axes:
        keep_upright(axes.yaxis)
    return figure


PICTURES_IN_CHINESE: dict[str, Callable[[], Figure]] = {
    name: functools.partial(in_chinese, draw) for name, draw in PICTURES.items()
}
"""The functions that draw figures with Chinese labels, by the name of the page that shows each figure."""
