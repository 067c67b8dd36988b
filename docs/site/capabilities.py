"""The tables of capabilities.md, in both languages, asked of the library itself: ``python docs/site/capabilities.py``.

Masks, mechanisms and caches are those that the library exports, kernels those that it asks. One that is new has no
example here, and is an error until it has. What a table says depends neither on the machine nor on whether the
compiled kernel is installed: kernels say of themselves what they run, and only caches and mechanisms are run.
"""

from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import saccade as sc
from saccade import caches, masks, mechanisms, positions, scores, statistics
from saccade.caches import LayerCache
from saccade.engine.ingredients import Ingredients
from saccade.engine.kernels import native
from saccade.engine.kernels.kernel import Kernel
from saccade.engine.product import KERNELS
from saccade.masks import Mask
from saccade.mechanisms import Mechanism, scorers
from saccade.statistics import Fold
from saccade.testing import error, tolerance

DOCS = Path(__file__).parents[1]
LANGUAGES = ("en", "zh")
TOKENS, SIDE = 4096, 64  # of the tables of masks; a grid of them is a square
FEW = 24  # tokens that mechanisms and caches are run on
SHORT, LONG = 256, 512  # lengths at which costs are told
WIDTH = 64

MASKS = {
    "Full": "Full()",
    "Causal": "Causal()",
    "Window": "Window(128, 128)",
    "Global": "Global([0])",
    "Strided": "Strided(64)",
    "Segments": "Segments(256, 256)",
    "Random": "Random(3, 64)",
    "Prefix": "Prefix(512)",
    "Blocks": "Blocks(torch.eye(64).bool(), 64)",
    "Coarse": "Coarse(Window(1, 0), 64)",
    "Neighborhood": "Neighborhood(64, 64, 3)",
    "Axial": 'Axial(64, 64, "both")',
    "ShiftedWindows": "ShiftedWindows(64, 64, 8, 4)",
    "Padding": "Padding([3072])",
    "PerItem": "PerItem([Causal()])",
    "Documents": "Documents([1024] * 4, Causal())",
    "Predicate": "Predicate(lambda b, h, q, kv: (q - kv).abs() <= 128)",
    "Dense": "Dense((torch.arange(2**24) % 3 > 0).view(4096, -1))",
    "And": "Causal() & Padding([3072])",
    "Or": "Window(128, 128) | Global([0])",
    "Not": "~Window(128, 128)",
    "After": "Causal().after(1)",
    "sliding_window": "sliding_window(256)",
    "longformer": "longformer(128)",
    "bigbird": "bigbird(64)",
    "streaming": "streaming(4, 256)",
    "sparse_transformer": "sparse_transformer(64)",
    "prefix_lm": "prefix_lm(512)",
    "image_rows": "image_rows(64, 63, 64)",
    "image_columns": "image_columns(64, 63, 64)",
    "image_neighbors": "image_neighbors(64, 63, 64, 3)",
}

MECHANISMS = {
    "Softmax": "Softmax()",
    "TopK": "TopK(DotProducts(), 4)",
    "TopK of index keys": "TopK(LightningIndexer(q, k, w), 4)",
    "Differential": "Differential(head_dim // 2)",
    "Linear": "Linear()",
    "Performer": "Performer(64)",
    "Linformer": "Linformer(kv_len, 6)",
    "Nystrom": "Nystrom(6)",
    "GatedLinear": "GatedLinear()",
    "Delta": "Delta()",
    "SSD": "SSD(heads)",
    "S4D": "S4D(heads, 8)",
    "CompressiveMemory": "CompressiveMemory(heads, segment)",
}

CACHES = {
    "KVCache": "KVCache()",
    "LatentCache": "LatentCache(head_dim)",
    "IndexedCache": "IndexedCache()",
    "SinkWindowCache": "SinkWindowCache(4, 8)",
    "SegmentCache": "SegmentCache(8, 4)",
    "BlockSelectCache": "BlockSelectCache(4, 32)",
    "HeavyHitterCache": "HeavyHitterCache(32)",
    "SnapKVCache": "SnapKVCache(32)",
    "EvictingCache": "ShortKeys(32)",
    "Int8Cache": "Int8Cache(4)",
    "RecurrentCache": "RecurrentCache()",
    "CompressiveCache": "CompressiveCache()",
    "CrossCache": "CrossCache()",
}

# Which mask is joined with the causal one in the dense run that a cache names; no mask at all for a context.
DENSE_RUNS: dict[str, Mask | None] = {
    "SinkWindowCache": masks.Causal() & masks.streaming(4, 8),
    "SegmentCache": masks.Causal() & masks.Segments(8, 4),
    "CrossCache": None,
}


class ShortKeys(caches.EvictingCache):
    """The rule of one's own that an `EvictingCache` wants: tokens with the longest keys go."""

    judges = 0

    def score(self, held: caches.Held) -> Tensor:
        return -held.key.norm(dim=-1)


class Input(NamedTuple):
    """What may come beside query and key, told in both languages."""

    en: str
    zh: str
    given: dict[str, Any] = {}
    dropout_p: float = 0.0
    dtype: torch.dtype | None = None
    needs_lse: bool = False
    forwards: bool = False


def _inputs() -> list[Input]:
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


REASONS = {
    "its mask calls a function": "它的掩码要调用函数",
    "it compiles masks, and a user's function may not compile": "它要编译掩码，而用户的函数未必能编译",
    "it takes full masks, and causal ones of as many rows as keys": "只收全掩码，以及行数与键数相同的因果掩码",
    "it takes windows of whole texts, in Documents or alone, over as many rows as keys": (
        "只收整段文本上的窗口，单独的或在 Documents 之内，行数与键数相同"
    ),
    "it gives no lse, and the lse is asked for": "它不给 lse，而这里要 lse",
    "its lse has no gradient": "它的 lse 没有梯度",
    "it has no softcap": "它没有 softcap",
    "it has no softcap and no bias": "它没有 softcap，也没有偏置",
    "it has no dropout": "它没有 dropout",
    "its dropout is not a function of positions": "它的 dropout 不是位置的函数",
    "it gets no bias: written out, that would take memory for every pair": "不给它偏置：写出来的话，每一对都要占内存",
    "it has no gradient for bias": "它没有偏置的梯度",
    "it has dot products only, and maps that end in one": "它只有点积，以及最后归为点积的映射",
    "it calls no function of scores": "它不调用改变得分的函数",
    "its derivatives are taken backwards, and here they are taken forwards": "它的导数是反向求的，这里要前向求",
    "it is not run inside transforms of torch.func": "它不在 torch.func 的变换里运行",
    "it has no float64": "它没有 float64",
    "it has no float32": "它没有 float32",
    "it has no float64 on this processor": "它在这个处理器上没有 float64",
    "it has no float16 on this processor": "它在这个处理器上没有 float16",
    "it brings no index keys": "它不带索引键",
    "index tensors must hold items, queries and keys, as the matrix does": "索引张量的项、查询和键要与矩阵一样多",
    "is not causal: a token reads what those before it have written": "不是因果的：词元读的是前面的词元写下的",
    "is not causal: a state knows what came before": "不是因果的：状态只知道前面的",
    "is not causal: a segment is read after it was written": "不是因果的：一段写完之后才读",
    "is none of Causal, Padding and Documents: a sum over keys is all that is kept of them, so queries cannot choose "
    "among them": "不是 Causal、Padding、Documents 之一：键只留下一个和，查询无从挑选",
    "lets queries see different keys: a slot mixes keys of the whole sequence, some of which a query would not see": (
        "让各查询看到不同的键：一个槽位混合整个序列的键，其中有些是查询看不到的"
    ),
    "lets queries see different keys: landmarks are means of tokens, some of which a query would not see": (
        "让各查询看到不同的键：地标是词元的平均，其中有些是查询看不到的"
    ),
    "is neither Causal nor Padding: a memory holds whole segments of one text": (
        "既不是 Causal 也不是 Padding：记忆保存的是一段文本的各个整段"
    ),
    "is no softmax, of which the largest terms could be chosen": "不是 softmax，挑不出最大的项",
    "is no sum over keys that could be carried on": "不是能接着加下去的键之和",
    "is no sum over segments that could be carried on": "不是能接着加下去的各段之和",
}
EQUALS = {
    "the full run": "完整的一遍",
    "the dense run with masks.streaming(sink_tokens, window)": "带 masks.streaming(sink_tokens, window) 的稠密一遍",
    "the dense run with masks.Segments(segment, memory)": "带 masks.Segments(segment, memory) 的稠密一遍",
    "within the budget the full run, and after that the dense run of each step in which other blocks are hidden": (
        "预算之内是完整的一遍；之后每一步是隐藏其余各块的稠密一遍"
    ),
    "the dense run in which the tokens that a key head let go before a call are hidden from it": (
        "稠密的一遍，其中每个键头在这次调用之前放走的词元对它隐藏"
    ),
    "the run with a KVCache that holds rounded keys and values": "KVCache 的一遍，其中的键和值是舍入过的",
}
WORDS = {
    "en": {
        "yes": "yes",
        "no": "–",
        "all": "all",
        "but": "all but {}",
        "and": ", ",
        "none": "none",
        "off": "up to {}",
        "not with": ", but not with {}",
        "index": "`TopK` of index keys",
        "mechanism": "the mechanism",
    },
    "zh": {
        "yes": "是",
        "no": "–",
        "all": "全部",
        "but": "除 {} 外全部",
        "and": "、",
        "none": "无",
        "off": "误差至多 {}",
        "not with": "，但配 {} 时不是",
        "index": "带索引键的 `TopK`",
        "mechanism": "机制",
    },
}
_ROUNDED = 1e-2  # errors below it are those of rounded keys; others mean another matrix
_TABLE = re.compile(r"^\|.*?\n(?=\n|\Z)", re.MULTILINE | re.DOTALL)


# ------------------------------------------------------------------------------------------ what the library exports


def exported_masks() -> list[str]:
    """Masks, and the recipes that are made of them; not what reads masks from elsewhere."""
    found = []
    for name in masks.__all__:
        one = getattr(masks, name)
        is_class = isinstance(one, type) and issubclass(one, Mask) and one is not Mask
        if is_class or getattr(one, "__module__", "") == "saccade.masks.recipes":
            found.append(name)
    return found


def exported_mechanisms() -> list[str]:
    """Mechanisms."""
    return [name for name in mechanisms.__all__ if name != "Mechanism"]


def exported_caches() -> list[str]:
    """Caches of a layer."""
    found = {name: getattr(caches, name) for name in caches.__all__}
    kinds = {name: kind for name, kind in found.items() if isinstance(kind, type) and issubclass(kind, LayerCache)}
    return [name for name, kind in kinds.items() if kind is not LayerCache]


def missing() -> list[str]:
    """What is exported and has no example, and examples of what is not exported."""
    told = {*MASKS, *CACHES, *(name.partition(" ")[0] for name in MECHANISMS)}
    return sorted(told.symmetric_difference((*exported_masks(), *exported_mechanisms(), *exported_caches())))


@cache
def mask_named(name: str) -> Mask:
    """An example of a mask, for `TOKENS` tokens."""
    made: Mask = eval(MASKS[name], {"torch": torch} | {one: getattr(masks, one) for one in masks.__all__})
    return made


# ------------------------------------------------------------------------------------------------------------ kernels


@contextmanager
def _anywhere() -> Iterator[list[Kernel]]:
    """Kernels that answer as if they were on their device, and the compiled one as if it were installed."""
    kernels = [type(kernel)() for kernel in KERNELS]
    for kernel in kernels:
        if hasattr(kernel, "devices"):
            kernel.devices = ("cpu",)
    with mock.patch.object(native, "abilities", return_value=native.HALF + 1):
        yield kernels


def _given(length: int, dtype: torch.dtype, mask: Mask | None, *, leaf: bool = False, **more: Any) -> Ingredients:
    query, key = (torch.zeros(1, 2, length, WIDTH, dtype=dtype) for _ in range(2))
    if leaf:
        query, key = query.requires_grad_(), key.requires_grad_()
    return Ingredients.of(query, key, mask, **more).current()


@cache
def kernels_of_masks() -> dict[str, dict[str, tuple[str, ...]]]:
    """Of each mask and kernel the reasons why it does not run; an empty tuple: it does."""
    found = {}
    with _anywhere() as kernels:
        for name in MASKS:
            wide, half = (_given(TOKENS, dtype, mask_named(name)) for dtype in (torch.float32, torch.bfloat16))
            found[name] = {one.name: min(one.reasons(wide, 0.0), one.reasons(half, 0.0), key=len) for one in kernels}
    return found


@cache
def kernels_of_inputs() -> dict[str, dict[str, tuple[str, ...]]]:
    """Of each input and kernel the reasons why it does not run, beside a full mask."""
    found = {}
    with _anywhere() as kernels:
        for one in _inputs():
            found[one.en] = {kernel.name: _reasons_of_input(kernel, one) for kernel in kernels}
    return found


def _reasons_of_input(kernel: Kernel, one: Input) -> tuple[str, ...]:
    answers = []
    for dtype in (torch.float32, torch.bfloat16) if one.dtype is None else (one.dtype,):
        given = _given(64, dtype, None, leaf=True, **one.given)
        if one.forwards:
            asked: list[tuple[str, ...]] = []

            def ask(x: Tensor, given: Ingredients = given, asked: list[tuple[str, ...]] = asked) -> Tensor:
                asked.append(kernel.reasons(given, 0.0))
                return x

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torch, about the compiler that it loads there
                torch.func.jvp(ask, (torch.zeros(1),), (torch.ones(1),))
            reasons = asked[0]
        else:
            reasons = kernel.reasons(given, one.dropout_p)
        if one.needs_lse or given.sink_logit is not None:
            reasons += kernel.reasons_of_lse(given)
        answers.append(reasons)
    return min(answers, key=len)


# -------------------------------------------------------------------------------------------------------------- costs


class MaskCost(NamedTuple):
    """Of all pairs of `TOKENS` tokens, shares that are allowed and that kernels compute; tiles; pairs looked at."""

    allowed: float
    fused: float
    native: float
    tiles: int
    asked: int


@cache
def costs_of_masks() -> dict[str, MaskCost]:
    """What each mask costs; nothing is computed."""
    found = {}
    with _anywhere() as kernels:
        by_name = {kernel.name: kernel for kernel in kernels}
        for name in MASKS:
            given = _given(TOKENS, torch.float32, mask_named(name))
            pieces = {
                strip.residual: tile.height * len(strip.keys)
                for tile in given.plan.tiles
                for strip in tile.columns
                if strip.residual is not True
            }
            runs = not by_name["native"].reasons(given, 0.0)
            shares = [
                by_name[one].pairs(given) / math.prod(given.shape) if runs or one == "fused" else math.nan
                for one in ("fused", "native")
            ]
            allowed = mask_named(name).density(TOKENS)
            found[name] = MaskCost(allowed, *shares, len(given.plan), sum(pieces.values()))
    return found


# --------------------------------------------------------------------------------------------------------- mechanisms


@cache
def _inputs_of_mechanisms() -> tuple[Tensor, ...]:
    """Query, key and value of two heads, and an indexer's query, key and weight."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query, key, value = (drawn(1, 2, FEW, 8) for _ in range(3))
    key = torch.nn.functional.normalize(key, dim=-1)  # as the delta rule wants them
    return query, key, value, drawn(1, 3, FEW, 4), drawn(1, 1, FEW, 4), drawn(1, 3, FEW)


def mechanism_named(
    name: str,
    queries: slice = slice(None),
    keys: slice = slice(None),
    *,
    heads: int = 2,
    head_dim: int = 8,
    kv_len: int = FEW,
    segment: int = 8,
) -> Any:
    """An example of a mechanism, for these of the tokens."""
    query, key, weight = _inputs_of_mechanisms()[3:]
    indexer = query[:, :, queries], key[:, :, keys], weight[:, :, queries]
    names = {one: getattr(mechanisms, one) for one in mechanisms.__all__} | vars(scorers)
    names |= dict(zip("qkw", indexer, strict=True)) | {"heads": heads, "head_dim": head_dim}
    names |= {"kv_len": kv_len, "segment": segment}
    torch.manual_seed(0)
    return eval(MECHANISMS[name], names).double()


class MechanismTold(NamedTuple):
    """What a mechanism's matrix is.

    Attributes:
        matrix: its class.
        is_softmax: whether products are those of softmax attention.
        is_stochastic: whether rows are distributions.
        has_lse, explains: whether it has an lse, and says which kernel runs.
        taken: masks that it takes.
        reason: why it takes not the first that it does not take.
        cache: what `new_cache` makes.
    """

    matrix: str
    is_softmax: bool
    is_stochastic: bool
    has_lse: bool
    explains: bool
    taken: tuple[str, ...]
    reason: str
    cache: str


@cache
def mechanisms_told() -> dict[str, MechanismTold]:
    """All mechanisms."""
    query, key, value = _inputs_of_mechanisms()[:3]
    found = {}
    for name in MECHANISMS:
        mechanism = mechanism_named(name)
        refused = {one: mechanism.reasons(mask_named(one)) for one in MASKS}
        mask = None if refused["Causal"] else masks.Causal()
        with torch.no_grad():
            matrix = mechanism(query, key, mask=mask)
            wrong = error(matrix @ value, sc.attention(query, key, value, mask, impl="reference"))
        found[name] = MechanismTold(
            type(matrix).__name__,
            wrong <= tolerance(torch.float64, "output"),
            matrix.is_stochastic,
            hasattr(matrix, "lse"),
            hasattr(matrix, "explain"),
            tuple(one for one, reasons in refused.items() if not reasons),
            next((refused[one][0] for one in ("Causal", "Window", "Full") if refused[one]), ""),
            type(mechanism.new_cache()).__name__,
        )
    return found


class MechanismCost(NamedTuple):
    """Operations of `SHORT` and `LONG` tokens, and at `LONG` those of a training step and of one token more."""

    short: float
    long: float
    training: float
    decode: float | None


@cache
def costs_of_mechanisms() -> dict[str, MechanismCost | None]:
    """What `saccade.cost` says of each mechanism, one head; None where it says nothing."""
    found: dict[str, MechanismCost | None] = {}
    with mock.patch.object(native, "is_on", return_value=False):
        for name in MECHANISMS:
            if name == "TopK of index keys":  # as of TopK: what is read depends on what tensors hold
                continue
            mechanism = mechanism_named(name, heads=1, head_dim=WIDTH, kv_len=LONG, segment=WIDTH).float()
            mask = None if mechanism.reasons(masks.Causal()) else masks.Causal()
            try:
                told = [sc.cost(mechanism, n, mask=mask, num_heads=1, head_dim=WIDTH) for n in (SHORT, LONG)]
            except sc.UnsupportedError:
                found[name] = None
                continue
            decode = told[1].decode
            flops = told[0].forward.flops, told[1].forward.flops, told[1].training.flops
            found[name] = MechanismCost(*flops, None if decode is None else decode.flops)
    return found


# ------------------------------------------------------------------------------------------------------------- caches


@cache
def caches_run() -> dict[str, dict[str, float | str]]:
    """Of each cache and mechanism how far a prefill and steps are from the dense run, or why they are refused."""
    found: dict[str, dict[str, float | str]] = {}
    for name in CACHES:
        found[name] = {}
        for own in MECHANISMS:
            try:
                with torch.no_grad():
                    found[name][own] = _error_of(name, own)
            except sc.UnsupportedError as refused:
                found[name][own] = _reasons_in(refused)[0]
            except ValueError as refused:
                found[name][own] = _rule_of(refused)
    return found


def cache_named(name: str, head_dim: int = 8) -> Any:
    """An example of a cache."""
    names = {one: getattr(caches, one) for one in caches.__all__}
    return eval(CACHES[name], names | {"head_dim": head_dim, "ShortKeys": ShortKeys})


def _error_of(name: str, own: str) -> float:
    query, key, value = _inputs_of_mechanisms()[:3]
    value = key if name == "LatentCache" else value
    mask = None if name == "CrossCache" else masks.Causal()
    made, parts = cache_named(name), []
    for start, stop in ((0, 12), (12, 13), (13, 17), (17, FEW)):
        rows = slice(start, stop)
        if name == "CrossCache":
            new = (None, None) if start else (key, value)
            parts.append(made.attend(mechanism_named(own, rows), query[:, :, rows], *new, mask=mask))
            continue
        mine = mechanism_named(own, rows, rows if name == "IndexedCache" else slice(0, stop))
        parts.append(made.attend(mine, query[:, :, rows], key[:, :, rows], value[:, :, rows], mask=mask))
    dense = mechanism_named(own)(query, key, mask=DENSE_RUNS.get(name, mask)) @ value
    return error(torch.cat(parts, 2), dense)


def _reasons_in(refused: Exception) -> list[str]:
    return [line.removeprefix("    - ") for line in str(refused).splitlines() if line.startswith("    - ")]


def _rule_of(refused: Exception) -> str:
    """What an argument must be, without the numbers of this case."""
    return re.sub(r"\b\d+ ", "", str(refused).partition(": ")[2].partition(";")[0])


class CacheSize(NamedTuple):
    """Bytes held after `SHORT` and `LONG` tokens, and read by the last step."""

    short: int
    long: int
    read: int


@cache
def sizes_of_caches() -> dict[str, CacheSize]:
    """In float32, one key head of width 64, with a mechanism that the cache is made for, else softmax."""
    found = {}
    for name in CACHES:
        told = mechanisms_told()
        own = next((one for one in MECHANISMS if told[one].cache == name), "Softmax")
        held = []
        for length in (SHORT, LONG):
            x, made = torch.zeros(1, 1, length, WIDTH), cache_named(name, WIDTH)
            ends = (0, length // 2, length - 1, length)  # so that room that is doubled is just as much as is needed
            for start, stop in pairwise(ends):
                rows = slice(start, stop)
                new = x[:, :, rows]
                both = (x, x) if name == "CrossCache" else (new, new)
                mask = None if name == "CrossCache" else masks.Causal()
                made.attend(
                    _narrow(own, rows), new, *((None, None) if name == "CrossCache" and start else both), mask=mask
                )
            held.append(made.nbytes)
        found[name] = CacheSize(*held, made.traffic.bytes_read)
    return found


def _narrow(own: str, rows: slice) -> Mechanism:
    """A mechanism for one head; index keys of 16 numbers."""
    if own != "TopK of index keys":
        made: Mechanism = mechanism_named(own, heads=1).float()
        return made
    few = rows.stop - rows.start
    narrow = torch.zeros(1, 1, few, 16)
    return mechanisms.TopK(scorers.LightningIndexer(narrow, narrow, narrow[..., 0]), 4)


# ------------------------------------------------------------------------------------------------------------- tables


def tables(language: str) -> list[str]:
    """The tables of a page, in its order."""
    if missing():
        raise ValueError(f"no example in {Path(__file__).name} of: {', '.join(missing())}")
    return [made(language) for made in TABLES]


def tables_in(text: str) -> list[str]:
    """The tables that stand in a page."""
    return _TABLE.findall(text)


def with_tables(text: str, language: str) -> str:
    """A page with the tables as the library has them."""
    made = iter(tables(language))
    return _TABLE.sub(lambda _: next(made), text)


def _table(*rows: tuple[str, ...]) -> str:
    first, *rest = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([first, "|---" * len(rows[0]) + "|", *rest]) + "\n"


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


def _joined(names: list[str], language: str) -> str:
    return WORDS[language]["and"].join(_code(name) for name in names) or WORDS[language]["none"]


def _all_but(names: list[str], every: list[str], language: str) -> str:
    """Some of all, or the others, whichever are fewer."""
    others = [one for one in every if one not in names]
    if len(others) < len(names):
        words = WORDS[language]
        return words["but"].format(_joined(others, language)) if others else words["all"]
    return _joined(names, language)


def _parted(reason: str) -> tuple[str, str]:
    """The class that a reason begins with, or nothing; and the rest."""
    name, _, rest = reason.removeprefix("a ").partition(" ")
    return (name, rest) if name[:1].isupper() else ("", reason)


def _said(reason: str, language: str) -> str:
    return REASONS[reason] if language == "zh" and reason else reason


def _merged(answers: dict[str, dict[str, tuple[str, ...]]]) -> list[list[str]]:
    """Kernels that answer alike, as one column."""
    alike: dict[tuple[bool, ...], list[str]] = {}
    for kernel in KERNELS:
        alike.setdefault(tuple(not row[kernel.name] for row in answers.values()), []).append(kernel.name)
    return list(alike.values())


def _yes_or_no(head: str, answers: dict[str, dict[str, tuple[str, ...]]], names: list[str], language: str) -> str:
    columns, words = _merged(answers), WORDS[language]
    rows = [(head, *(" ".join(_code(one) for one in own) for own in columns))]
    for name, row in zip(names, answers.values(), strict=True):
        rows.append((name, *(words["no"] if row[own[0]] else words["yes"] for own in columns)))
    return _table(*rows)


def _masks_by_kernel(language: str) -> str:
    names = [_code(MASKS[name]) for name in kernels_of_masks()]
    return _yes_or_no({"en": "mask", "zh": "掩码"}[language], kernels_of_masks(), names, language)


def _inputs_by_kernel(language: str) -> str:
    names = [getattr(one, language) for one in _inputs()]
    return _yes_or_no(
        {"en": "beside query and key", "zh": "查询和键之外"}[language], kernels_of_inputs(), names, language
    )


def _reasons_of_masks(language: str) -> str:
    return _reasons_by_kernel(kernels_of_masks(), language)


def _reasons_of_inputs(language: str) -> str:
    return _reasons_by_kernel(kernels_of_inputs(), language)


def _reasons_by_kernel(answers: dict[str, dict[str, tuple[str, ...]]], language: str) -> str:
    found: dict[str, dict[str, None]] = {}
    for row in answers.values():
        for name, reasons in row.items():
            for reason in reasons:
                found.setdefault(reason, {})[name] = None
    head = {"en": ("reason", "kernels"), "zh": ("理由", "内核")}[language]
    return _table(head, *((_said(one, language), _joined(list(names), language)) for one, names in found.items()))


def _costs_of_masks(language: str) -> str:
    head = {
        "en": ("mask", "allowed", "`fused`", "`native`", "tiles", "looked at"),
        "zh": ("掩码", "允许", "`fused`", "`native`", "分块", "查看"),
    }[language]
    rows = [
        (
            _code(MASKS[name]),
            _share(one.allowed),
            _share(one.fused),
            "–" if math.isnan(one.native) else _share(one.native),
            f"{one.tiles:,}",
            f"{one.asked:,}",
        )
        for name, one in costs_of_masks().items()
    ]
    return _table(head, *rows)


def _share(part: float) -> str:
    return f"{100 * part:.3g} %"


def _known_of_masks(language: str) -> str:
    head = {
        "en": ("mask", "causal", "distances only", "hides keys only", "plan kept"),
        "zh": ("掩码", "因果", "只看距离", "只隐藏键", "计划可保留"),
    }[language]
    words, rows = WORDS[language], []
    for name, shown in MASKS.items():
        mask = mask_named(name)
        known = (mask.is_causal, mask.is_relative, mask.hides_keys_only, mask.is_value)
        rows.append((_code(shown), *(words["yes" if one else "no"] for one in known)))
    return _table(head, *rows)


def _mechanisms(language: str) -> str:
    head = {
        "en": ("mechanism", "its matrix", "softmax of all keys", "rows sum to 1", "lse, `explain()`", "decodes with"),
        "zh": ("机制", "矩阵", "对全部键的 softmax", "每行之和为 1", "lse、`explain()`", "解码用"),
    }[language]
    words, rows = WORDS[language], []
    for name, one in mechanisms_told().items():
        known = (one.is_softmax, one.is_stochastic, one.has_lse and one.explains)
        cells = [words["yes" if x else "no"] for x in known]
        cells.append(_code(one.cache) if "Causal" in one.taken else words["no"])
        rows.append((_code(MECHANISMS[name]), _code(one.matrix), *cells))
    return _table(head, *rows)


def _masks_of_mechanisms(language: str) -> str:
    alike: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for name, one in mechanisms_told().items():
        alike.setdefault((one.taken, one.reason), []).append(name.partition(" ")[0])
    head = {
        "en": ("mechanism", "takes", "does not take, for instance"),
        "zh": ("机制", "接受", "不接受的，例如"),
    }[language]
    rows = []
    for (taken, reason), names in alike.items():
        subject, rest = _parted(reason)
        told = f"{_code(subject)} {_said(rest, language)}" if reason else "–"
        own = _all_but(list(taken), list(MASKS), language)
        rows.append((_joined(list(dict.fromkeys(names)), language), own, told))
    return _table(head, *rows)


def questions() -> dict[bool, list[str]]:
    """Questions to a matrix, by whether they want distributions."""
    found: dict[bool, list[str]] = {False: [], True: []}
    for name in statistics.__all__:
        one = getattr(statistics, name)
        if isinstance(one, type) and issubclass(one, Fold) and not inspect.isabstract(one):
            found[one.needs_distributions is True].append(name)
    return found


def _statistics(language: str) -> str:
    head = {"en": ("asked of", "questions"), "zh": ("可以问", "问题")}[language]
    kinds = {"en": ("every matrix", "rows that sum to 1"), "zh": ("任何矩阵", "每行之和为 1 的矩阵")}[language]
    rows = [(kind, _joined(questions()[needs], language)) for kind, needs in zip(kinds, (False, True), strict=True)]
    return _table(head, *rows)


def _costs_of_mechanisms(language: str) -> str:
    head = {
        "en": ("mechanism", "forward", "grows by", "training", "a step"),
        "zh": ("机制", "前向", "增长到几倍", "训练", "一步"),
    }[language]
    rows = []
    for name, one in costs_of_mechanisms().items():
        if one is None:
            rows.append((_code(MECHANISMS[name]), *"––––"))
            continue
        step = "–" if one.decode is None else f"{one.decode / 1e3:.3g}"
        forward, training = (f"{flops / 1e6:.3g}" for flops in (one.long, one.training))
        rows.append((_code(MECHANISMS[name]), forward, f"{one.long / one.short:.2g}", training, step))
    return _table(head, *rows)


def _caches_by_mechanism(language: str) -> str:
    head = {"en": ("cache", "runs with"), "zh": ("缓存", "可以配")}[language]
    rows = []
    for name, row in caches_run().items():
        runs = [one for one, said in row.items() if not isinstance(said, str) and said < _ROUNDED]
        told = _all_but(runs, list(row), language)
        rows.append((_code(CACHES[name]), told.replace("`TopK of index keys`", WORDS[language]["index"])))
    return _table(head, *rows)


def _refusals_of_caches(language: str) -> str:
    """Each reason once: what it is about, and the caches that give it."""
    found: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for name, row in caches_run().items():
        for said in row.values():
            if isinstance(said, str):
                subject, rest = _parted(said)
                subjects, own = found.setdefault(rest, ({}, {}))
                subjects |= {subject: None} if subject else {}
                own[name] = None
    head = {"en": ("refused", "why", "by"), "zh": ("拒绝的", "理由", "谁")}[language]
    rows = []
    for rest, (subjects, own) in found.items():
        told = _joined(list(subjects), language) if subjects else WORDS[language]["mechanism"]
        rows.append((told, _said(rest, language), _all_but(list(own), list(CACHES), language)))
    return _table(head, *rows)


def _dense_runs(language: str) -> str:
    head = {"en": ("cache", "equals", "measured"), "zh": ("缓存", "等于", "测得")}[language]
    limit, words, rows = tolerance(torch.float64, "output"), WORDS[language], []
    for name, row in caches_run().items():
        errors = {one: said for one, said in row.items() if not isinstance(said, str)}
        worst = max(wrong for wrong in errors.values() if wrong < _ROUNDED)
        others = [one for one, wrong in errors.items() if wrong >= _ROUNDED]
        told = words["yes"] if worst <= limit else words["off"].format(f"{worst:.0e}")
        told += words["not with"].format(_joined(others, language)) if others else ""
        equals = getattr(caches, name).equals
        rows.append((_code(CACHES[name]), equals if language == "en" else EQUALS[equals], told))
    return _table(head, *rows)


def _sizes_of_caches(language: str) -> str:
    head = {
        "en": ("cache", f"{SHORT} tokens", f"{LONG} tokens", "each further one", "read by a step"),
        "zh": ("缓存", f"{SHORT} 个词元", f"{LONG} 个词元", "每多一个", "一步读取"),
    }[language]
    rows = [
        (
            _code(CACHES[name]),
            f"{one.short:,}",
            f"{one.long:,}",
            f"{(one.long - one.short) / (LONG - SHORT):g}",
            f"{one.read:,}",
        )
        for name, one in sizes_of_caches().items()
    ]
    return _table(head, *rows)


TABLES: tuple[Callable[[str], str], ...] = (
    _masks_by_kernel,
    _reasons_of_masks,
    _inputs_by_kernel,
    _reasons_of_inputs,
    _costs_of_masks,
    _known_of_masks,
    _mechanisms,
    _masks_of_mechanisms,
    _statistics,
    _costs_of_mechanisms,
    _caches_by_mechanism,
    _refusals_of_caches,
    _dense_runs,
    _sizes_of_caches,
)
"""In the order of the page."""


def main() -> None:
    """Write the tables into both pages."""
    for language in LANGUAGES:
        page = DOCS / language / "capabilities.md"
        page.write_text(with_tables(page.read_text(encoding="utf-8"), language), encoding="utf-8")


if __name__ == "__main__":
    main()
