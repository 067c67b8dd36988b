"""Words of the cells of tables in both languages; the library itself translates its reasons."""

from __future__ import annotations

from saccade.support.language import Language, translated
from saccade.support.language import in_language as language_of_the_library

RULES = {  # of errors, which the library itself has in English only
    "index tensors must hold items, queries and keys, as the matrix does": "索引张量的项、查询和键要与矩阵一样多",
}
EQUALS = {
    "the full run": "完整运行",
    "the dense run with masks.streaming(sink_tokens, window)": "带 masks.streaming(sink_tokens, window) 的稠密运行",
    "the dense run with masks.Segments(segment, memory)": "带 masks.Segments(segment, memory) 的稠密运行",
    "the full run up to the budget; beyond it, for each step, the dense run that hides the other blocks": (
        "预算之内是完整运行；之后每一步是隐藏其余各块的稠密运行"
    ),
    "the dense run that hides from each key head the tokens it evicted before the call": (
        "稠密运行，其中每个键头在这次调用之前淘汰的词元对它隐藏"
    ),
    "the run with a KVCache that stores rounded keys and values": "KVCache 的运行，其中的键和值是舍入过的",
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


def parted(reason: str) -> tuple[str, str]:
    """Split a reason into the class that it begins with, if any, and the rest."""
    name, _, rest = reason.removeprefix("a ").partition(" ")
    return (name, rest) if name[:1].isupper() else ("", reason)


def in_language(reason: str, language: Language) -> str:
    """Return a reason in the language of the page, in the words of the library."""
    with language_of_the_library(language):
        return translated(reason) if language == "en" else RULES.get(reason, translated(reason))
