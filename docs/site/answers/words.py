"""What is told, in both languages: the words of cells, and the sentences of the library in Chinese."""

from __future__ import annotations

REASONS = {
    "its mask calls a function": "掩码要调用函数",
    "it compiles masks, and a user's function may not compile": "掩码要编译，而用户的函数未必能编译",
    "it supports full masks, and causal masks "
    "with as many queries as keys": "只接受全掩码，以及行数与键数相同的因果掩码",
    "it supports windows over whole texts, in Documents or alone, with as many queries as keys": (
        "只接受整个序列上的窗口，单独的或在 Documents 之内，行数与键数相同"
    ),
    "it does not return the lse, which is needed here": "不返回 lse，而这里需要 lse",
    "its lse has no gradient": "lse 没有梯度",
    "it has no softcap": "不支持软上限",
    "it has no softcap and no bias": "不支持软上限和偏置",
    "it has no dropout": "不支持 dropout",
    "its dropout is not a function of positions": "dropout 不是位置的函数",
    "it would need a dense bias, which takes memory for every pair": "不支持偏置：展开后每个查询-键对都要占内存",
    "it has no gradient for bias": "没有偏置的梯度",
    "it supports only dot products, and maps that end in one": "只支持点积，以及最后归为点积的映射",
    "it does not call functions of scores": "不支持改变得分的函数",
    "it has no forward-mode derivatives, which are needed here": "只支持反向求导，而这里需要前向求导",
    "it is not run inside transforms of torch.func": "不能在 torch.func 的变换里运行",
    "it has no float64": "不支持 float64",
    "it has no float32": "不支持 float32",
    "it has no index keys": "没有索引键",
    "index tensors must hold items, queries and keys, as the matrix does": "索引张量的项、查询和键要与矩阵一样多",
    "is not causal: a token reads only what "
    "earlier tokens have written": "不是因果的：词元读取的是前面的词元写入的内容",
    "is not causal: a state contains only earlier tokens": "不是因果的：状态只包含前面的内容",
    "is not causal: gates count from a key forward to the query": "不是因果的：门从键开始向后计入，直到查询",
    "its weights depend on the keys in between, and this cache does not pass on all of them": (
        "它的权重取决于中间的键，而这种缓存不会传递全部的键"
    ),
    "is not causal: a segment is read after it was written": "不是因果的：一段写完之后才读取",
    "is not causal: a block is compressed after its last token": "不是因果的：一个块在最后一个词元之后才压缩",
    "is neither Causal nor padding on the right: blocks are counted from position 0": (
        "既不是 Causal 也不是右侧的填充：块从位置 0 数起"
    ),
    "blocks are counted from position 0, without gaps: padding is possible on the right, by a mask": (
        "块从位置 0 数起，中间不能有空缺：右侧的填充可以用掩码表示"
    ),
    "is none of Causal, Padding and Documents: only a sum over keys is stored, so queries cannot choose "
    "among keys": "不是 Causal、Padding、Documents 之一：键只保留一个和，查询无法从中挑选",
    "lets queries see different keys: a slot mixes keys of the whole sequence, "
    "some of which would be hidden from a query": (
        "让各查询看到不同的键：一个槽位混合整个序列的键，其中有些是查询看不到的"
    ),
    "lets queries see different keys: landmarks are means of tokens, some of which would be hidden from a query": (
        "让各查询看到不同的键：地标是词元的平均，其中有些是查询看不到的"
    ),
    "is neither Causal nor Padding: a memory stores whole segments of one text": (
        "既不是 Causal 也不是 Padding：记忆保存的是一段文本的各个整段"
    ),
    "is not a softmax, so there are no largest terms to select": "不是 softmax，无法挑出最大的项",
    "cannot be continued as a sum over keys": "不是可以继续累加的键之和",
    "cannot be continued as a sum over segments": "不是可以继续累加的各段之和",
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


def in_language(reason: str, language: str) -> str:
    """Return a reason in the language of the page."""
    return REASONS[reason] if language == "zh" and reason else reason
