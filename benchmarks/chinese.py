"""Labels of the figures in Chinese; names of packages, models and dtypes stay."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.plotting import beside, heading, label
from benchmarks.questions import QUESTIONS

AXES = {
    "tokens": "词元",
    "forward pass, ms": "前向，毫秒",
    "memory beside inputs, MiB": "输入之外的内存，MiB",
    "times faster; line: target, grey: not asked on this machine": "快多少倍；竖线：目标，灰色：在这台机器上不要求",
}
"""Whole labels."""

WORDS = {
    # of cases
    "window ±256 as a mask": "窗口 ±256 写成掩码",
    "causal window": "因果窗口",
    "window": "窗口",
    "causal documents of": "因果文档，每篇",
    "causal sums": "因果求和",
    "gated delta": "门控 delta",
    "causal": "因果",
    "layer": "层",
    "features included": "含特征",
    "global projections copied": "复制全局投影",
    "without the wheel": "不装 wheel",
    "beside a busy process": "另有进程占用",
    "forward + backward": "前向 + 反向",
    "with backward": "含反向",
    "forward": "前向",
    "training step": "训练一步",
    "everything but matmul and attention": "矩阵乘法和注意力以外的部分",
    "half of the pairs": "一半的词对",
    "after the first look": "看过一次之后",
    "each of 63 tokens after the first": "首个之后 63 个词元，平均每个",
    "first token after 1280": "1280 个词元之后的第一个",
    "1024 of them in a store on disk": "其中 1024 个存在磁盘上",
    "table of 257 distances": "257 个距离的表",
    "32 heads, 8 key heads of 128": "32 个头，8 个宽 128 的键头",
    "budget 1/8: a step": "预算 1/8：一步",
    "blocks of": "块大小",
    "streaming": "流式",
    "strided": "跨步",
    "full": "全部",
    "tokens": "个词元",
    "token": "词元",
    "packed": "打包",
    "padded": "填充",
    "beside reading weights and cache once": "与读取权重和缓存一遍相比",
    "not compiled": "不编译",
    "compiled": "编译",
    "step": "步长",
    "time": "时间",
    "2 threads": "2 个线程",
    # of peers
    "transformers' sdpa": "transformers 的 sdpa",
    "no-wheel": "不装 wheel",
    "all keys": "全部键",
    "read anew": "重新读",
    "written out": "写成稠密",
    "weights stored": "存下权重",
    "broadcast form": "广播形式",
}
"""Pieces of labels."""

_LONGEST_FIRST = re.compile(r"\b(?:" + "|".join(map(re.escape, sorted(WORDS, key=len, reverse=True))) + r")(?![\w'])")


def in_words(text: str) -> str:
    """Translate a label into Chinese, piece by piece."""
    return re.sub(r", ", "，", _LONGEST_FIRST.sub(lambda found: WORDS[found[0]], text))


def of(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the labels of figures of these rows, and their translations."""
    titles = {heading(own.TITLE): own.TITLE_ZH.partition("，")[0] for own in QUESTIONS.values()}
    cases = {label(row): in_words(row["case"]) for row in rows}
    return AXES | titles | cases | {name: in_words(name) for name in map(beside, rows) if name}
