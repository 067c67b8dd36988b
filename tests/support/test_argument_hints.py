"""Argument names from other libraries work, or get one of our error messages with the right name.

No call gives an error of torch's or Python's own, or a wrong answer.
"""

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

import saccade as sc
from saccade import caches, masks, mechanisms, models, nn, positions, scores, statistics, viz
from saccade.masks import Causal, Dense, Documents, Full, Global, Padding, Window

Q = torch.randn(2, 4, 5, 8, generator=torch.Generator().manual_seed(0))
K, V = Q[:, :2].repeat(1, 1, 2, 1)[:, :, :6].contiguous(), torch.ones(2, 2, 6, 3)
X = torch.ones(2, 5, 16)
BOOL = torch.ones(5, 6, dtype=torch.bool)
TOKENS = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])


def attend(*args, **kwargs):
    return sc.attention(*(args or (Q, K, V)), **kwargs)


def matrix(**kwargs):
    return sc.AttentionMatrix(Q, K, **kwargs)


def layer(**kwargs):
    return nn.MultiHeadAttention(16, 4, **kwargs)


# ruff: noqa: PLW0108  a call is written as people write it
# The name that torch or others use: a call with it, and words of the error message.
SENTENCES: dict[str, tuple[Callable[[], object], str]] = {
    # attention, from SDPA and FlashAttention
    "is_causal": (lambda: attend(is_causal=True), "mask=masks.Causal()"),
    "causal": (lambda: attend(causal=True), "mask=masks.Causal()"),
    "attn_mask": (lambda: attend(attn_mask=BOOL), "mask= takes a bool tensor"),
    "dropout": (lambda: attend(dropout=0.1), "dropout_p="),
    "enable_gqa": (lambda: attend(enable_gqa=True), "omit it"),
    "key_padding_mask": (lambda: attend(key_padding_mask=TOKENS == 0), "masks.from_key_padding_mask"),
    "attention_mask": (lambda: attend(attention_mask=TOKENS), "masks.from_attention_mask"),
    "need_weights": (lambda: attend(need_weights=True), "AttentionMatrix(query, key, ...) gives the weights"),
    "softmax_scale": (lambda: attend(softmax_scale=0.1), "scale="),
    "window_size": (lambda: attend(window_size=(3, 0)), "masks.from_sliding_window"),
    "alibi_slopes": (lambda: attend(alibi_slopes=torch.ones(4)), "positions.ALiBi"),
    "cu_seqlens_q": (lambda: attend(cu_seqlens_q=torch.tensor([0, 5])), "saccade.pack"),
    "score_mod": (lambda: attend(score_mod=lambda s, b, h, q, k: s), "score= takes a function"),
    "block_mask": (lambda: attend(block_mask=None), "masks.from_block_mask"),
    "return_lse": (lambda: attend(return_lse=True), "attention_with_lse"),
    "batch_first": (lambda: attend(batch_first=True), "batch comes first"),
    "logits_soft_cap": (lambda: attend(soft_cap=30.0), "softcap="),
    "a name of nobody's": (lambda: attend(nobody=1), "its parameters are query, key, value, mask, score"),
    "with_lse, is_causal": (lambda: sc.attention_with_lse(Q, K, V, is_causal=True), "mask=masks.Causal()"),
    "lists": (lambda: attend([[1.0]], K, V), "query must be a tensor; got list"),
    "arrays": (lambda: attend(np.ones((2, 4, 5, 8)), K, V), "query must be a tensor; got ndarray"),
    "three dimensions": (lambda: attend(Q[0], K[0], V[0]), "must have four dimensions"),
    "three dimensions, and the way": (lambda: attend(Q[0], K[0], V[0]), "for [heads, len, head_dim], pass x[None]"),
    "two dimensions": (lambda: attend(Q[0, 0], K[0, 0], V[0, 0]), "for [len, head_dim], pass x[None, None]"),
    "whole numbers": (lambda: attend(Q.long(), K, V), "query must be float32"),
    "a mask of floats": (lambda: attend(mask=torch.zeros(5, 6)), "mask must be bool"),
    "a mask of 0 and 1": (lambda: attend(mask=TOKENS), "mask must be bool"),
    "a mask of tokens": (lambda: attend(mask=TOKENS.bool()), "mask must have shape [5, 6]"),
    "a mask by name": (lambda: attend(mask="causal"), "a saccade mask, a bool tensor or a function"),
    "a mask by name, and the way": (lambda: attend(mask="causal"), "Hint: to parse text, call masks.parse("),
    "a mask's class": (lambda: attend(mask=Causal), "Hint: create an instance: masks.Causal(...)"),
    "another class": (lambda: attend(mask=dict), "mask must be"),
    "a list of lists": (lambda: attend(mask=[[True] * 6] * 5), "mask must be"),
    "a bias of bools": (lambda: attend(bias=BOOL), "pass it as mask="),
    "a bias's class": (lambda: attend(bias=positions.ALiBi), "bias must be"),
    "a score's class": (lambda: attend(score=scores.Cosine), "score must be"),
    "a score by name": (lambda: attend(score="cosine"), "score must be"),
    "a mask as score": (lambda: attend(score=Causal()), "score must be"),
    "scale as text": (lambda: attend(scale="1"), "scale must be"),
    "scale nan": (lambda: attend(scale=float("nan")), "scale must be"),
    "softcap 0": (lambda: attend(softcap=0.0), "softcap must be"),
    "dropout 1": (lambda: attend(dropout_p=1.0), "dropout_p must be"),
    "dropout -1": (lambda: attend(dropout_p=-0.1), "dropout_p must be"),
    "a kernel of nobody's": (lambda: attend(impl="flash"), "impl must be"),
    "positions of keys only": (lambda: attend(kv_positions=range(6)), "q_positions must be given"),
    "positions too few": (lambda: attend(q_positions=[1, 2]), "q_positions"),
    "float positions": (lambda: attend(q_positions=torch.zeros(5)), "q_positions"),
    # the matrix
    "the matrix and values": (lambda: sc.AttentionMatrix(Q, K, V), "mask must be"),
    "value=": (lambda: matrix(value=V), "pass the values to A @ value"),
    "A.T": (lambda: matrix().T, "A.mT"),
    "A.transpose": (lambda: matrix().transpose(-1, -2), "A.mT"),
    "A.softmax": (lambda: matrix().softmax(-1), "softmaxed"),
    "A.sum": (lambda: matrix().sum(-1), "A.received()"),
    "A.mean": (lambda: matrix().mean(), "A.summary()"),
    "A.numpy": (lambda: matrix().numpy(), "A.to_dense()"),
    "A.cpu": (lambda: matrix().cpu(), "A.to(device, dtype)"),
    "A.plot": (lambda: matrix().plot(), "viz.heatmap"),
    "A.size": (lambda: matrix().size(), "A.shape"),
    "A + 1": (lambda: matrix() + 1, "an operand of + must be a matrix"),
    "A * tensor": (lambda: matrix() * torch.ones(5, 6), "a factor must be"),
    "torch.softmax(A)": (lambda: torch.softmax(matrix(), -1), "torch's softmax"),
    "torch.sum(A)": (lambda: torch.sum(matrix()), "torch's sum"),
    "F.dropout(A)": (lambda: torch.nn.functional.dropout(matrix()), "be a tensor; got a lazy"),
    "A @ numbers": (lambda: matrix() @ 3, "value must be a tensor"),
    "A @ other heads": (lambda: matrix() @ torch.ones(2, 3, 6, 3), "value must have shape [2, 2, 6, value_dim]"),
    "A @ another dtype": (lambda: matrix() @ V.double(), "float32"),
    "A[5 parts]": (lambda: matrix()[0, 0, 0, 0, 0], "at most batch, head, query, key"),
    "A[list]": (lambda: matrix()[[0]], "index must consist of"),
    "A[far]": (lambda: matrix()[0, 9], "head index must be in"),
    "A.to(int)": (lambda: matrix().to(torch.int32), "a device, a float dtype"),
    "topk(0)": (lambda: matrix().topk(0), "k must be"),
    "pooled by name": (lambda: matrix().pooled(4, how="median"), "how must be"),
    "ask a class": (lambda: matrix().compute(statistics.Entropy), "instances of saccade.statistics.Statistic"),
    "scores @ value": (lambda: matrix().scores @ V, "values are multiplied by weights"),
    "scores' entropy": (lambda: matrix().scores.entropy(), "Entropy cannot run"),
    # masks
    "Window(4)": (lambda: Window(4), "Window(4, 0) only 4 back"),
    "Window()": (lambda: Window(), "Window: left and right must be given; got nothing"),
    "Window(size=4)": (lambda: Window(size=4), "Window"),
    "Window(-1, 0)": (lambda: Window(-1, 0), "left must be"),
    "Window(1.5, 0)": (lambda: Window(1.5, 0), "left must be"),
    "Causal(6)": (lambda: Causal(6), "has no length"),
    "Causal(n=6)": (lambda: Causal(n=6), "rules on positions"),
    "Full(3, 3)": (lambda: Full(3, 3), "has no length"),
    "Padding()": (lambda: Padding(), "Padding: lengths must be given"),
    "Padding(tensor of 0 and 1)": (lambda: Padding(TOKENS), "lengths"),
    "Padding(5)": (lambda: Padding(5), "lengths"),
    "Documents()": (lambda: Documents(), "Documents: lengths must be given"),
    "Documents(ids)": (lambda: Documents([0, 0, 1, 1.5]), "Documents"),
    "Global()": (lambda: Global(), "Global: positions must be given"),
    "Global(0)": (lambda: Global(0), "positions"),
    "Dense(floats)": (lambda: Dense(torch.zeros(3, 3)), "bool"),
    "Causal() + 1": (lambda: Causal() + 1, "combine masks with & (both)"),
    "Causal() + bias": (lambda: Causal() + torch.zeros(3, 3), "bias="),
    "Causal() * Window": (lambda: Causal() * Window(1, 1), "combine masks with & (both)"),
    "1 - Causal()": (lambda: 1 - Causal(), "~ (not)"),
    "Causal() and Window": (lambda: Causal() and Window(1, 1), "combine masks with & (both)"),
    "not Causal()": (lambda: not Causal(), "~ (not)"),
    "Causal() & None": (lambda: Causal() & None, "mask"),
    "Causal() & tensor": (lambda: Causal() & BOOL, "mask"),
    "len(Causal())": (lambda: len(Causal()), "rule on positions"),
    "np.array(Causal())": (lambda: np.array(Causal()), "mask.to_dense(n)"),
    "Causal.picture()": (lambda: Causal().picture("5"), "picture"),
    "to_dense(-1)": (lambda: Causal().to_dense(-1), "q_len"),
    "sliding_window('4')": (lambda: masks.sliding_window("4"), "window"),
    "streaming(4)": (lambda: masks.streaming(4), "streaming: window must be given"),
    "streaming()": (lambda: masks.streaming(), "streaming: sink_tokens and window must be given; got nothing"),
    "MultiHeadAttention()": (lambda: nn.MultiHeadAttention(), "embed_dim and num_heads must be given; got nothing"),
    "TopK()": (lambda: mechanisms.TopK(), "TopK(256) selects by dot products"),
    "ALiBi(trainable=)": (
        lambda: positions.ALiBi(8, trainable=True),
        "for a trained bias, use positions.T5(num_heads)",
    ),
    "ALiBi(slopes)": (lambda: positions.ALiBi(torch.ones(8)), "for a trained bias, use positions.T5(num_heads)"),
    "cost(model, ids)": (lambda: sc.cost(Causal(), TOKENS), "as in cost(model, ids.shape[1])"),
    "compare(q, k)": (lambda: sc.compare(Q, K), "compare: value and mechanisms must be given"),
    "bigbird()": (lambda: masks.bigbird(), "bigbird: block_size must be given"),
    "from_attention_mask(list)": (lambda: masks.from_attention_mask([[1]]), "be a tensor"),
    "from_cu_seqlens(lengths)": (lambda: masks.from_cu_seqlens([3, 4]), "begin with 0"),
    "from_block_mask(function)": (lambda: masks.from_block_mask(lambda b, h, q, k: q >= k), "is already a mask"),
    # layers
    "d_model": (lambda: nn.MultiHeadAttention(d_model=16, nhead=4), "embed_dim="),
    "nhead": (lambda: nn.MultiHeadAttention(16, nhead=4), "num_heads="),
    "layer, dropout": (lambda: layer(dropout=0.1), "dropout_p="),
    "layer, bias": (lambda: layer(bias=False), "projection_bias="),
    "layer, batch_first": (lambda: layer(batch_first=True), "batch comes first"),
    "layer, kdim": (lambda: layer(kdim=8), "context_dim="),
    "layer, add_bias_kv": (lambda: layer(add_bias_kv=True), "replace_attention"),
    "layer, add_zero_attn": (lambda: layer(add_zero_attn=True), "sink_logit"),
    "layer, device": (lambda: layer(device="cpu"), "layer.to(device, dtype)"),
    "layer, is_causal": (lambda: layer(is_causal=True), "mask=masks.Causal()"),
    "layer, num_key_value_heads": (lambda: layer(num_key_value_heads=2), "num_kv_heads="),
    "layer, a tensor for a pattern": (lambda: layer(mask=BOOL), "pass it to the call"),
    "layer, a mechanism's class": (lambda: layer(mechanism=mechanisms.Linear), "mechanism must be"),
    "layer, heads": (lambda: nn.MultiHeadAttention(16, 3), "num_heads"),
    "layer(x, x, x, attn_mask)": (lambda: layer()(X, X, X, attn_mask=BOOL), "mask= takes a bool tensor"),
    "layer(key_padding_mask)": (lambda: layer()(X, key_padding_mask=BOOL), "masks.from_key_padding_mask"),
    "layer(need_weights)": (lambda: layer()(X, need_weights=True), "AttentionMatrix"),
    "layer(is_causal)": (lambda: layer()(X, is_causal=True), "mask=masks.Causal()"),
    "layer(attention_mask)": (lambda: layer()(X, attention_mask=TOKENS), "masks.from_attention_mask"),
    "layer(past_key_values)": (lambda: layer()(X, past_key_values=None), "cache="),
    "layer(position_ids)": (lambda: layer()(X, position_ids=None), "positions="),
    "layer(two dimensions)": (lambda: layer()(X[0]), "query"),
    "layer(another width)": (lambda: layer()(X[..., :8]), "query"),
    "layer(double)": (lambda: layer()(X.double()), "dtype"),
    "layer(text)": (lambda: layer()("hello"), "query must be"),
    "layer(cache of nobody's)": (lambda: layer()(X, cache=[]), "cache"),
    "layer(cache without order)": (lambda: layer()(X, cache=caches.KVCache()), "mask"),
    "EncoderLayer(16, 4)": (lambda: nn.EncoderLayer(16, 4), "EncoderLayer"),
    "from_torch(model)": (lambda: nn.from_torch(torch.nn.Linear(2, 2)), "module must"),
    "replace_attention(Linear)": (
        lambda: sc.replace_attention(torch.nn.Linear(2, 2)),
        "it contains no supported attention module",
    ),
    "replace_attention, a class": (lambda: sc.replace_attention(torch.nn.Linear), "model must be a module"),
    "to_torch(Linear)": (lambda: nn.to_torch(torch.nn.Linear(2, 2)), "module must"),
    # the rest
    "pack(tensor)": (lambda: sc.pack(X), "list of tensors"),
    "pack()": (lambda: sc.pack(), "texts must be given; got nothing"),
    "cost(tokens)": (lambda: sc.cost(seq_len=64), "subject must be given; got nothing"),
    "cost(tokens), and the way": (lambda: sc.cost(seq_len=64), "Hint: a mask, as cost(masks.Causal(), 4096)"),
    "cost without a length": (lambda: sc.cost(Causal()), "cost: seq_len must be given"),
    "cost(length=)": (lambda: sc.cost(Causal(), length=64), "seq_len=, the number of tokens"),
    "growth()": (lambda: sc.costs.growth(kind="flops"), "its parameters are costs, what, memory"),
    "audit()": (lambda: sc.audit(), "audit: model must be given"),
    "audit(mask=)": (lambda: sc.audit(layer(), mask=Causal()), "rule=, the rule that the model is checked against"),
    "compare()": (lambda: sc.compare(Q, K, V), "compare: mechanisms must be given"),
    "replace_attention(attn_mask=)": (
        lambda: sc.replace_attention(layer(), attn_mask=BOOL),
        "its parameters are model, mask, mechanism",
    ),
    "record(function)": (lambda: sc.record(lambda x: x), "model"),
    "heatmap(text)": (lambda: viz.heatmap("text"), "heatmap"),
    "record()": (lambda: sc.record(), "record: model must be given"),
    "record(keeps=)": (lambda: sc.record(None, keeps="qk"), "its parameters are model, layers, heads, keep, callback"),
    "heatmap(labels=)": (lambda: viz.heatmap(torch.eye(3), labels="abc"), "head, batch, x_labels, y_labels"),
    "heatmap(heads=)": (lambda: viz.heatmap(torch.eye(3), heads=1), "its parameters are weights, head"),
    "mosaic(maps, title)": (lambda: viz.mosaic(torch.eye(3), "title"), "by name: batch=, title="),
    "report(recording)": (lambda: viz.report({}), "report: path must be given"),
    "save(figure)": (lambda: viz.save(None), "save: path must be given"),
    "generate, too short": (lambda: models.generate(None, [[1]]), "max_new_tokens must be given"),
    "generate(temperature=)": (lambda: models.generate(None, [[1]], 3, temperature=0.5), "sampler=Sampler(temperature"),
    "stream(eos_token_id=)": (lambda: models.stream(None, [[1]], 3, eos_token_id=0), "Hint: stop="),
    "beam_search(num_beams=)": (lambda: models.beam_search(None, [[1]], 3, num_beams=2), "beams=..."),
    "beam_search, how wide": (lambda: models.beam_search(None, [[1]], 3), "beams must be given"),
    "DecoderConfig()": (lambda: models.DecoderConfig(), "vocab_size, max_len, embed_dim, num_heads"),
    "DecoderConfig(vocab=)": (lambda: models.DecoderConfig(vocab=3), "Hint: vocab_size="),
    "DecoderConfig(d_model=)": (lambda: models.DecoderConfig(d_model=3), "Hint: embed_dim="),
    "DecoderConfig(ffn_dim=)": (lambda: models.DecoderConfig(ffn_dim=3), "Hint: feed_forward_dim="),
    "EncoderDecoderConfig(depth=)": (lambda: models.EncoderDecoderConfig(depth=3), "num_encoder_layers"),
    "generate(text)": (lambda: models.generate("gpt2", [[1]], 3), "model"),
    "Decoder(512)": (lambda: models.Decoder(512), "config"),
    "from_pretrained(hub)": (lambda: models.Decoder.from_pretrained("gpt2"), "folder"),
    "KVCache('big')": (lambda: caches.KVCache("big"), "max_len"),
    "ALiBi()": (lambda: positions.ALiBi(), "ALiBi"),
    "Linear(256, 4)": (lambda: mechanisms.Linear(256, 4), "Linear"),
    "ShawKeys(8)": (lambda: positions.ShawKeys(8), "ShawKeys"),
    "Softmax(dropout=)": (lambda: mechanisms.Softmax(dropout=0.1), "dropout"),
}

WORKS: dict[str, Callable[[], object]] = {
    "longformer(4)": lambda: masks.longformer(4),
    "a bool tensor": lambda: attend(mask=BOOL),
    "a function": lambda: attend(mask=lambda b, h, q, kv: q >= kv),
    "a function of scores": lambda: attend(score=lambda s, b, h, q, kv: s + 1),
    "an attention mask": lambda: attend(mask=masks.from_attention_mask(TOKENS)),
    "torch.matmul(A, v)": lambda: torch.matmul(matrix(), V),
    "v @ A": lambda: torch.ones(2, 4, 3, 5) @ matrix(),
    "A * 2": lambda: (matrix() * 2) @ V,
    "A - 0.5 * A": lambda: (matrix() - 0.5 * matrix()) @ V,
    "len(A)": lambda: len(matrix()),
    "np.array(A)": lambda: np.array(matrix()),
    "A.to(float64)": lambda: matrix().to(torch.float64) @ V.double(),
    "A[b, h]": lambda: matrix()[0, 1],
    "A[..., i, j]": lambda: matrix()[..., 1, 2],
    "A.scores": lambda: matrix().scores[0, 0],
    "positions as a list": lambda: attend(mask=Causal(), q_positions=[1, 2, 3, 4, 5]),
    "new_cache": lambda: layer(mask=Causal())(X, cache=layer(mask=Causal()).new_cache()),
    "x, x, x": lambda: layer()(X, X, X),
}


@pytest.mark.parametrize("name", WORKS)
def test_plain_calls_work(name):
    assert WORKS[name]() is not None


_OURS = re.compile(r"[\w. ']+: .+ (must|cannot) .+[;:].*")


@pytest.mark.parametrize("name", SENTENCES)
def test_the_rest_gets_a_sentence_with_the_word_of_ours(name):
    call, words = SENTENCES[name]
    refusals = (TypeError, ValueError, AttributeError, IndexError, NotImplementedError)
    with pytest.raises(refusals, match=re.escape(words)) as error:
        call()
    text = str(error.value)
    assert _OURS.match(text.splitlines()[0]), text


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((), "missing 3 required positional arguments: 'query', 'key', and 'value'"),
        ((Q,), "missing 2 required positional arguments: 'key' and 'value'"),
        ((Q, K), "missing 1 required positional argument: 'value'"),
        ((Q, K, V, None, 0.1, True), "takes from 3 to 4 positional arguments but 6 were given"),
    ],
)
@pytest.mark.parametrize("function", [sc.attention, sc.attention_with_lse])
def test_python_names_missing_and_surplus_values_of_attention(function, values, words):
    """Python's own message suffices for these calls: a wrapper with our words would slow down every product."""
    with pytest.raises(TypeError, match=re.escape(f"{function.__name__}() {words}")):
        function(*values)


@pytest.mark.parametrize("name", sorted({*viz.__all__} - {"MissingGlyphsWarning"}))
def test_every_figure_and_page_says_what_it_is_called_with(name):
    with pytest.raises(TypeError, match=f"{name}: an argument must be one of its parameters; got unheard_of="):
        getattr(viz, name)(unheard_of=1)


def test_there_are_enough_of_them():
    assert len(SENTENCES) + len(WORKS) >= 150
