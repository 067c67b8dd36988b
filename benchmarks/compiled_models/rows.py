"""Rows of the table: small models that run on saccade or on SDPA, and their arguments for any length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

import saccade as sc
from saccade import masks
from saccade.integrations.transformers import install
from saccade.nn import MultiHeadAttention

WIDTH, HEADS = 32, 4
SIZES = {"vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": HEADS}
NO_END = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
DECODER = {"num_key_value_heads": 2, **NO_END}
T5 = {"vocab_size": 64, "d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": HEADS}
GPT2 = {"vocab_size": 64, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, **NO_END}
LAYERS = ["sliding_attention", "full_attention"]

TRANSFORMERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **DECODER)),
    "mistral": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**SIZES, **DECODER, sliding_window=6)
    ),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**SIZES, **DECODER, head_dim=8, sliding_window=6, layer_types=LAYERS)
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(**T5, eos_token_id=None, decoder_start_token_id=0)
    ),
}


class _Layer(nn.Module):
    """A causal attention layer with padding: `MultiHeadAttention`, or the same written with SDPA."""

    def __init__(self, implementation: str):
        super().__init__()
        self.attention, self.is_ours = MultiHeadAttention(WIDTH, HEADS, mask=masks.Causal()), implementation != "sdpa"

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        layer = self.attention
        if self.is_ours:
            out: Tensor = layer(x, mask=masks.from_attention_mask(tokens))
            return out
        projections = (layer.query_projection, layer.key_projection, layer.value_projection)
        q, k, v = (part(x).unflatten(2, (HEADS, -1)).transpose(1, 2) for part in projections)
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        heads = F.scaled_dot_product_attention(q, k, v, causal & tokens.bool()[:, None, None])
        projected: Tensor = layer.output_projection(heads.transpose(1, 2).flatten(2))
        return projected


class _Encoder(nn.Module):
    """A causal ``nn.TransformerEncoder`` with padding, with its attention replaced or not."""

    def __init__(self, implementation: str):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        if implementation != "sdpa":
            sc.replace_attention(self.encoder)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        out: Tensor = self.encoder(x, later, tokens == 0, is_causal=True)
        return out


class _Logits(nn.Module):
    """A model of transformers without a cache, with tensors as arguments; ``where`` is named ``argument``."""

    def __init__(self, name: str, implementation: str, argument: str):
        super().__init__()
        install()
        self.model, self.argument = TRANSFORMERS[name](), argument
        self.model.set_attn_implementation(implementation)
        self.model.config.use_cache = False

    def forward(self, input_ids: Tensor, where: Tensor, decoder_input_ids: Tensor | None = None) -> Tensor:
        more = {} if decoder_input_ids is None else {"decoder_input_ids": decoder_input_ids}
        logits: Tensor = self.model(input_ids=input_ids, **{self.argument: where}, **more).logits
        return logits


@dataclass(frozen=True)
class Row:
    """A model, with a batch of two sequences of any length.

    Attributes:
        kind: a key of `TRANSFORMERS`, or "layer" or "encoder".
        padding: side of the padding of the first sequence, "left" or "right"; or "packed" if each row holds three texts
            whose ``position_ids`` restart, or "bool" or "float" if a mask of four axes separates the same texts.
        generates: whether the model generates text.
    """

    kind: str
    padding: str = "left"
    generates: bool = False

    def make(self, implementation: str) -> nn.Module:
        """Return the model in evaluation mode, with the same weights each time.

        Args:
            implementation: "saccade" or "sdpa".
        """
        torch.manual_seed(0)
        if self.kind in TRANSFORMERS:
            argument = "position_ids" if self.padding == "packed" else "attention_mask"
            return _Logits(self.kind, implementation, argument).eval()
        return (_Layer if self.kind == "layer" else _Encoder)(implementation).eval()

    def arguments(self, n: int) -> tuple[Tensor, ...]:
        """Return random arguments of the model for sequences of ``n`` tokens."""
        if self.padding in ("packed", "bool", "float"):
            return torch.randint(1, 64, (2, n)), self._texts(n)
        tokens = torch.ones(2, n, dtype=torch.long)
        tokens[0, slice(0, 3) if self.padding == "left" else slice(n - 3, n)] = 0
        if self.kind not in TRANSFORMERS:
            return torch.randn(2, n, WIDTH), tokens
        more = (torch.randint(1, 64, (2, n - 2)),) if self.kind == "t5" else ()
        return torch.randint(1, 64, (2, n)), tokens, *more

    def _texts(self, n: int) -> Tensor:
        """Return the positions of three texts in each row, or the mask that separates them."""
        texts = torch.tensor([[0] * 2 + [1] * 3 + [2] * (n - 5), [0] * (n - 4) + [1] * 3 + [2]])
        if self.padding == "packed":
            first = torch.searchsorted(texts, texts)  # index of the first token of each token's text
            return torch.arange(n) - first
        allowed = (texts[:, None, :, None] == texts[:, None, None]) & torch.ones(n, n, dtype=torch.bool).tril()
        added = torch.randn(2, 1, n, n)
        return allowed if self.padding == "bool" else added.masked_fill(~allowed, torch.finfo(added.dtype).min)

    def compared(self, out: Tensor, arguments: tuple[Tensor, ...]) -> Tensor:
        """Return the output at tokens. At padding, whose queries may see no key, implementations differ."""
        is_padded = self.kind != "t5" and self.padding in ("left", "right")
        return out[arguments[1].bool()] if is_padded else out

    def shapes(self) -> tuple[dict[int, Any], ...]:
        """Return the dynamic dimensions of the arguments for an export."""
        length = Dim("length", min=6, max=512)
        where = {2: length, 3: length} if self.padding in ("bool", "float") else {1: length}
        return ({1: length}, where, {1: Dim("target", min=2, max=512)})[: 3 if self.kind == "t5" else 2]


ROWS: dict[str, Row] = {
    "MultiHeadAttention": Row("layer", padding="right"),
    "nn.TransformerEncoder": Row("encoder", padding="right"),
    "Llama": Row("llama", generates=True),
    "Llama, packed": Row("llama", padding="packed"),
    "Llama, bool mask": Row("llama", padding="bool"),
    "Llama, float mask": Row("llama", padding="float"),
    "Mistral": Row("mistral", generates=True),
    "Gemma 3": Row("gemma3", generates=True),
    "GPT-2": Row("gpt2", generates=True),
    "GPT-2, packed": Row("gpt2", padding="packed"),
    "GPT-2, bool mask": Row("gpt2", padding="bool"),
    "GPT-2, float mask": Row("gpt2", padding="float"),
    "BERT": Row("bert", padding="right"),
    "T5": Row("t5", padding="right", generates=True),
}
