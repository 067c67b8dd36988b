"""The tables of tolerances.md, in both languages, from the code: ``python docs/site/tolerances.py``.

Each table follows its heading; what else the page says is written by hand.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import torch

from saccade.auditing.rounding_noise import FACTOR
from saccade.engine.first_use_check import check_kernel
from saccade.testing import TOLERANCES
from saccade.theory.measurement import SIGMAS, equal

DOCS = Path(__file__).parents[1]
LANGUAGES = ("en", "zh")
COLUMNS = {
    "en": {"": "inputs", "output": "output", "lse": "lse", "gradient": "gradient", "why": "why"},
    "zh": {"": "输入", "output": "输出", "lse": "lse", "gradient": "梯度", "why": "理由"},
}
REASONS = {
    "sums of up to 1e4 terms of 1.1e-16 each, in any order; float32 anywhere would show as 1e-8": (
        "至多 1e4 项之和，每项误差 1.1e-16，次序任意；只要有一处用了 float32，误差就会达到 1e-8"
    ),
    "as the output": "同输出",
    "a second chain of sums on top of the first": "在前一串求和之上又有一串求和",
    "sums of up to 1e3 terms, each rounded by 6e-8 in either direction (2e-6 together); half precision anywhere would "
    "show as 1e-3": (
        "至多 1e3 项之和，每项舍入误差 6e-8，有正有负（合计约 2e-6）；只要有一处用了半精度，误差就会达到 1e-3"
    ),
    "as the output: both chains of sums together stay below it": "同输出：两串求和合起来也不超过它",
    "rounded once at the end (2e-3), and the weights once before they meet the values (2e-3 each)": (
        "最后舍入一次（2e-3），权重与值相乘之前也舍入一次（各 2e-3）"
    ),
    "a float32 result of float32 sums of exact products": "精确乘积的 float32 求和，结果也是 float32",
    "weights, their gradients and the output that enters them are each rounded (2e-3) before a sum": (
        "权重、权重的梯度和进入其中的输出，在求和之前各舍入一次（2e-3）"
    ),
    "as bfloat16, with three bits more": "同 bfloat16，多三个二进制位",
    "as bfloat16": "同 bfloat16",
}
_TABLE = re.compile(r"^\|.*?\n(?=\n)", re.MULTILINE | re.DOTALL)


def tables(language: str) -> list[str]:
    """Return the tables of a page, in its order."""
    return [_limits(language), _reasons(language), _elsewhere(language)]


def with_tables(text: str, language: str) -> str:
    """Return a page with the tables of the code."""
    made = iter(tables(language))
    return _TABLE.sub(lambda _: next(made), text)


def _limits(language: str) -> str:
    """Return the allowed error of each dtype and quantity, and its size in units of rounding."""
    names = COLUMNS[language]
    quantities = ("output", "lse", "gradient")
    lines = [f"| {names['']} | {' | '.join(names[one] for one in quantities)} |", "|---|---|---|---|"]
    for dtype in dict.fromkeys(dtype for dtype, _ in TOLERANCES):
        cells = [_limit(dtype, quantity, TOLERANCES[dtype, quantity].limit) for quantity in quantities]
        lines.append(f"| {_name(dtype)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _limit(dtype: torch.dtype, quantity: str, limit: float) -> str:
    computed = torch.float32 if quantity == "lse" and dtype != torch.float64 else dtype  # the lse is never in half
    units = float(f"{limit / torch.finfo(computed).eps:.2g}")
    return f"{limit:.0e} ({units:,.10g})"


def _reasons(language: str) -> str:
    names = COLUMNS[language]
    lines = [f"| {names['']} | {names['why']} |", "|---|---|"]
    for (dtype, quantity), entry in TOLERANCES.items():
        why = entry.reason if language == "en" else REASONS[entry.reason]
        lines.append(f"| {_name(dtype)} {names[quantity]} | {why} |")
    return "\n".join(lines) + "\n"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _elsewhere(language: str) -> str:
    first = ", ".join(f"{_name(dtype)} {limit:g}" for dtype, limit in check_kernel._LIMITS.items())
    rounding = f"{inspect.signature(equal).parameters['tolerance'].default:.0e}"
    rows = {
        "en": [
            ("check", "limit", "unit"),
            (
                "first use of a compiled kernel ([on a GPU](gpu.md))",
                first,
                "the root of the sum of squares of the products that are summed",
            ),
            (
                "two ways of running a model ([audit](audit.md))",
                f"{FACTOR:g} times",
                "the effect of one rounding in every part of that model, measured on it",
            ),
            (
                "averages of random samples ([claims](theory.md))",
                f"{SIGMAS:g} standard errors",
                "the standard error of the samples; chance exceeds the limit less than once in a million",
            ),
            ("numbers of a claim in float64 ([claims](theory.md))", rounding, "the number itself"),
        ],
        "zh": [
            ("检查", "限值", "单位"),
            ("编译的内核首次使用（[GPU](gpu.md)）", first, "相加的各个乘积的平方和的平方根"),
            (
                "同一模型的两种运行方式（[审计](audit.md)）",
                f"{FACTOR:g} 倍",
                "模型每一部分各舍入一次所引起的变化，在该模型上测得",
            ),
            (
                "随机样本的平均（[论断](theory.md)）",
                f"{SIGMAS:g} 个标准误",
                "样本的标准误；偶然超出的概率不到百万分之一",
            ),
            ("论断里的 float64 数（[论断](theory.md)）", rounding, "数本身"),
        ],
    }[language]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---|---|---|", *lines[1:]]) + "\n"


def main() -> None:
    """Write the tables into both pages."""
    for language in LANGUAGES:
        page = DOCS / language / "tolerances.md"
        page.write_text(with_tables(page.read_text(encoding="utf-8"), language), encoding="utf-8")


if __name__ == "__main__":
    main()
