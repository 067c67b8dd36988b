"""Draw the pictures of pages whose code draws them, in both languages: ``python tests/project/docs/pictures.py``.

Names of pictures choose among them, as in ``pictures.py audit.png``. The code of a page is the same in both languages
and writes English words; the Chinese picture has Chinese ones instead.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from test_documents import ROOT, said_by

from saccade import viz
from saccade.support.language import chinese, in_language
from saccade.theory.pictures_in_chinese import in_chinese
from saccade.viz.mosaics import SCALES
from saccade.viz.titles import short_name

PAGES = ("figures", "findings", "audit", "cost", "recipes/rollout-on-an-image", "gallery")
CHINESE = {
    # figures
    "Head 2 of 8,000 tokens": "8,000 个词元的第 2 个头",
    "query": "查询",
    "key": "键",
    "up to 1": "最大 1",
    "Attention received": "收到的注意力",
    "key, counted from 1": "键，从 1 数起",
    "queries' whole attention": "合多少个查询的全部注意力",
    "weight": "权重",
    "brightness": "亮度",
    "uniform attention": "均匀注意力",
    "Which patches a word attends to": "一个词关注哪些图块",
    "red": "红",
    "blue": "蓝",
    # findings
    "all-MiniLM-L6-v2: every head (H) of every layer (L)": "all-MiniLM-L6-v2：所有层的所有头",
    "small-decoder: every head (H) of every layer (L)": "small-decoder：所有层的所有头",
    "given to the token before": "给前一个词元的",
    "entropy, share of the possible": "熵，占最大可能的份额",
    "small-decoder, layer 3: attention by distance": "small-decoder，第 3 层：注意力与距离",
    "tokens back": "往回多少个词元",
    "share of all attention": "占全部注意力的份额",
    # recipes
    "Attention rollout": "注意力 rollout",
    # gallery
    "Layer 2, head 0": "第 2 层第 0 个头",
    "A window, a sink and a stride": "窗口、汇点与步长",
    "weight × gradient": "权重 × 梯度",
    "Every head (H) of every layer (L)": "所有层的所有头",
    "entropy, nats": "熵（奈特）",
    "given to the first token": "给第一个词元的",
    "Heads of each layer": "各层的头",
    "Patches that a word attends to": "一个词关注的图块",
    "disc": "圆盘",
    "The same weights, resized smoothly": "同样的权重，平滑缩放",
    "Gates of an SE block": "SE 模块的门控值",
    "channel": "通道",
    "Causal, 512 tokens": "因果掩码，512 个词元",
    "median relative error": "相对误差的中位数",
    "milliseconds": "毫秒",
    "rough": "粗略",
    "close": "接近",
    "exact": "精确",
    "Window of 256": "窗口 256",
    "Declared and measured": "声明的与测得的",
    "leak: hidden, but seen (140)": "泄漏：遮住了，却看得见（140）",
    # audit
    "LlamaForCausalLM, rule Documents(lengths=((24, 24),), rule=Causal()) in 2 layers": "LlamaForCausalLM，规则："
    "Documents(lengths=((24, 24),), rule=Causal())，共 2 层",
    "declared": "声明的",
    "measured by gradients": "由梯度测得的",
    "output": "输出",
    "token": "词元",
    "allowed": "允许",
    "hidden": "遮住",
    "leak: hidden, but seen (576)": "泄漏：遮住了，却看得见（576）",
    "blind: allowed, but not seen (0)": "盲区：允许，却看不见（0）",
    # cost
    "Causal(), batch 1, float32": "Causal()，批大小 1，float32",
    "tokens": "词元",
    "forward": "前向",
    "training": "训练",
    "decode": "解码",
    "cache": "缓存",
    "available": "可用",
} | {f"head {number}": f"第 {number} 个头" for number in range(5)}
HEADS = [{"layer": i} for i in range(6)] + [{"head": i} for i in range(12)]
HEADS += [{"layer": i, "head": j} for i in range(6) for j in range(12)]


def all_words() -> dict[str, str]:
    """The words of the pages, the library's sentences below titles, and the names of heads."""
    english = [short_name(**one) for one in HEADS]
    with in_language("zh"):
        heads = dict(zip(english, [short_name(**one) for one in HEADS], strict=True))
    return CHINESE | {words: chinese()[words] for words in SCALES.values()} | heads


def main(pages: Sequence[str] = PAGES, names: Sequence[str] = ()) -> None:
    """Run the code of pages in an empty folder, and keep the pictures that the pages show, or those of these names."""
    images, save = ROOT / "docs" / "images", viz.save

    def keep(figure, path):
        if (images / path).exists() and (not names or path in names):  # a page does not show all that it draws
            save(figure, images / path)
            save(in_chinese(lambda: figure, all_words()), images / "zh" / path)
        return Path(path)

    with TemporaryDirectory() as folder, patch.object(viz, "save", keep):
        os.chdir(folder)
        for page in pages:
            scope: dict[str, object] = {}
            for block in said_by(ROOT / "docs" / "en" / f"{page}.md"):
                if block.language == "python":
                    exec(block.text, scope)
        os.chdir(ROOT)


if __name__ == "__main__":
    main(names=sys.argv[1:])
