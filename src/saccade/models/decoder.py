"""Decoder: a language model of the GPT and Llama families."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from saccade.caches import Cache
from saccade.masks import Mask
from saccade.masks.rules.documents import positions_in_documents
from saccade.matrix import Matrix
from saccade.mechanisms import Softmax
from saccade.models.decoder_config import DecoderConfig, LayerPattern
from saccade.models.initial_weights import init_small_weights, scale_residual_weights
from saccade.models.llama4 import Llama4, Llama4Text
from saccade.models.llama_relatives import Cohere2, Gemma2, Gemma3, Olmo2, Qwen3
from saccade.models.model_inputs import check_tokens
from saccade.models.next_token_loss import check_targets, mean_cross_entropy, next_tokens
from saccade.models.pretrained import SavedText
from saccade.models.saccade_format import SaccadeFormat
from saccade.models.text_formats import GPT2, Llama, Qwen2
from saccade.models.trained_length import warn_beyond
from saccade.nn import (
    DecoderLayer,
    DecoderStack,
    FeedForward,
    MixtureOfExperts,
    MultiHeadAttention,
    SharedKeyAttention,
)
from saccade.nn.base_layer import AttentionLayer
from saccade.nn.norms import make_norm
from saccade.nn.projections import is_only_product
from saccade.positions import ALiBi, Bias, Learned, Rotary, ShawKeys
from saccade.positions.token_positions import GivenPositions, Positions
from saccade.support.errors import value_error
from saccade.support.torch_modes import is_tracing
from saccade.support.validation import check_int, check_type

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Decoder(SavedText):
    """A decoder language model that predicts the probabilities of the next token at every position.

    `from_pretrained` reads the formats of GPT-2, Llama, Mistral, Qwen2, Qwen3, OLMo 2, Gemma 2 and 3 (text), Cohere 2
    and Llama 4 (text). `save_pretrained` writes the format of GPT-2, Llama or (with a sliding window) Mistral if the
    model fits one of them. If not, it writes our own format, which `from_pretrained` also reads.

    Args:
        config: sizes and options of the model.
        tokenizer: stored as ``decoder.tokenizer`` and saved with the weights; not used by the model itself.

    Cost: O(num_layers * (len * embed_dim ** 2 + pairs * embed_dim)) time, where pairs is the number of pairs
    that the mask allows. Memory is linear in len, plus ``len * vocab_size`` for the logits, which `hidden` does not
    compute.

    Example:
        >>> config = DecoderConfig(
        ...     vocab_size=100, max_len=32, embed_dim=16, num_heads=4, num_kv_heads=2, num_layers=2, feed_forward_dim=40
        ... )
        >>> decoder = Decoder(config).eval()
        >>> tokens = torch.tensor([[1, 2, 3, 4]])
        >>> decoder(tokens).shape
        torch.Size([1, 4, 100])
        >>> cache = decoder.new_cache()
        >>> first, last = decoder(tokens[:, :3], cache=cache), decoder(tokens[:, 3:], cache=cache)
        >>> torch.allclose(torch.cat([first, last], 1), decoder(tokens), atol=1e-6)
        True

    Reference: Radford et al. 2019 (GPT-2); Touvron et al. 2023, arXiv:2302.13971, section 2.2 (Llama).
    """

    formats = {
        "gpt2": GPT2(),
        "llama": Llama(),
        "mistral": Llama(),
        "qwen2": Qwen2(),
        "qwen3": Qwen3(),
        "olmo2": Olmo2(),
        "gemma2": Gemma2(),
        "gemma3_text": Gemma3(),
        "cohere2": Cohere2(),
        "llama4_text": Llama4Text(),
        "llama4": Llama4(),
        "saccade-decoder": SaccadeFormat(),
    }
    written_types = ("llama", "gpt2", "saccade-decoder")

    def __init__(self, config: DecoderConfig, tokenizer: Tokenizer | None = None):
        super().__init__()
        self.config = check_type("config", config, DecoderConfig, "be a saccade.models.DecoderConfig")
        self.tokenizer = tokenizer
        self.embedding = nn.Embedding(config.vocab_size, config.embed_dim)
        is_learned = config.position_encoding == "learned"
        self._trained_len: int | None = None  # set when published weights are loaded
        self.position = Learned(config.max_len, config.embed_dim) if is_learned else None
        self.dropout = nn.Dropout(config.dropout_p)
        norm = make_norm(config.norm, config.embed_dim, config.norm_eps)
        self.stack = DecoderStack(_layers(config), final_norm=norm, value_residual=config.value_residual)
        self.head = None if config.tied else nn.Linear(config.embed_dim, config.vocab_size, bias=False)
        init_small_weights(self)
        scale_residual_weights(self, config.num_layers)

    def forward(
        self,
        tokens: Tensor,
        *,
        mask: object = None,
        positions: GivenPositions = None,
        rotary_positions: GivenPositions = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return the decoder's logits for the next token at every position.

        Args:
            tokens: int ``[batch, len]``; with a cache, only the new tokens.
            mask: a mask for this batch, combined with the model's own mask by ``&``. With ``Documents(lengths)`` for
                packed sequences, masks and position vectors restart in each document.
            positions: positions of the tokens: a range, or int64 ``[len]`` or ``[batch, len]``; -1 marks padding,
                regardless of the token. By default, positions start at 0 or continue those in the cache.
            rotary_positions: positions for the rotation only, if they differ from the positions that masks use; see
                `saccade.nn.MultiHeadAttention.forward`.
            cache: the cache of earlier calls, from `new_cache`; new tokens are added to it.

        Returns:
            Logits, ``[batch, len, vocab_size]``; row i predicts token i + 1.

        Raises:
            TypeError: tokens are not integers.
            ValueError: the shape is wrong, a token is outside the vocabulary or, with learned positions, the sequence
                is longer than ``max_len``.
        """
        all_positions = {"positions": positions, "rotary_positions": rotary_positions}
        return self.logits(self.hidden(tokens, mask=mask, cache=cache, **all_positions))

    def hidden(
        self,
        tokens: Tensor,
        *,
        mask: object = None,
        positions: GivenPositions = None,
        rotary_positions: GivenPositions = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return the output of the last decoder layer, ``[batch, len, embed_dim]``. For the arguments, see `forward`.

        Logits are often the largest tensor. After a long prompt, compute only the last token's:
        ``logits(hidden(tokens, cache=cache)[:, -1:])``.
        """
        x, positions = self._embedded(tokens, mask, positions, cache)
        return self.stack(x, mask=mask, positions=positions, rotary_positions=rotary_positions, cache=cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return next-token logits ``[..., vocab_size]`` for the decoder's output ``[..., embed_dim]``."""
        logits = F.linear(hidden, self.embedding.weight) if self.head is None else self.head(hidden)
        config = self.config
        if config.logit_scale != 1.0:
            logits = logits * config.logit_scale
        if config.logit_softcap is not None:
            logits = config.logit_softcap * torch.tanh(logits / config.logit_softcap)
        return logits

    def loss(
        self,
        tokens: Tensor,
        *,
        targets: Tensor | None = None,
        mask: object = None,
        positions: GivenPositions = None,
        rotary_positions: GivenPositions = None,
        chunk_size: int | None = None,
    ) -> Tensor:
        """Return the mean cross-entropy of the next token, in nats, without storing the logits of all tokens.

        The last token of a text has no target. With `Documents` in the mask, the last token of each document has none.
        Padding (from `Padding`, or at position -1) has no target and is never a target.

        Args:
            tokens, mask, positions, rotary_positions: as in `forward`.
            targets: the target of each token, int64 ``[batch, len]``, or -100 if it has none; by default, the next
                token of the same text. Pass targets if only some tokens count, such as answers, or if the mask is a
                tensor.
            chunk_size: number of tokens whose logits are computed at a time; by default, about four million logits.

        Returns:
            A scalar; nan if no token has a target.

        Raises:
            TypeError, ValueError: as in `forward`; also if the targets do not match the tokens, or if there are no
                targets and the mask depends on the batch but does not show where texts end.

        Cost: memory for ``chunk_size * vocab_size`` logits instead of ``len * vocab_size``. With gradients and more
        than one chunk, gradients are computed beside the loss in eager training on CPUs in float32 and float64,
        if logits are only a product (no softcap, scale, hook or adapter); else logits are computed twice. Under
        torch.func, the logits of all tokens are stored.
        """
        vocab_size = self.config.vocab_size
        if chunk_size is not None:
            check_int("chunk_size", chunk_size)
        check_tokens("tokens", tokens, vocab_size)
        targets = next_tokens(tokens, mask, positions) if targets is None else targets
        check_targets(targets, tokens, vocab_size)
        hidden = self.hidden(tokens, mask=mask, positions=positions, rotary_positions=rotary_positions)
        return mean_cross_entropy(self.logits, hidden, targets, chunk_size, vocab_size, self._output_weight())

    def _output_weight(self) -> Tensor | None:
        """Return the weight ``[vocab_size, embed_dim]`` if `logits` is only a product with it, or None."""
        head, config = self.head, self.config
        is_more = config.logit_scale != 1.0 or config.logit_softcap is not None
        if is_more or type(self).logits is not Decoder.logits or "logits" in vars(self):
            return None
        if head is None:
            return self.embedding.weight
        return head.weight if is_only_product(head) else None

    @torch.no_grad()
    def matrices(
        self,
        tokens: Tensor,
        *,
        mask: object = None,
        positions: GivenPositions = None,
        rotary_positions: GivenPositions = None,
    ) -> list[Matrix]:
        """Return the attention matrices that `forward` uses in the decoder's layers.

        Returns:
            One lazy matrix per layer, ``[batch, num_heads, len, len]``, without gradients. For gradients, use
            ``decoder.stack.matrices`` or ``saccade.record(model, keep="gradients")``.

        Cost: a forward pass without gradients, and memory that is linear in len.
        """
        x, positions = self._embedded(tokens, mask, positions, None)
        return self.stack.matrices(x, mask=mask, positions=positions, rotary_positions=rotary_positions)

    def new_cache(self, max_len: int | None = None) -> Cache:
        """Return an empty cache for this decoder, to pass to `forward`.

        Args:
            max_len: number of tokens to allocate memory for in advance; if None, the cache grows as needed.
        """
        return self.stack.new_cache(max_len)

    def _embedded(
        self, tokens: Tensor, mask: object, positions: GivenPositions, cache: Cache | None
    ) -> tuple[Tensor, Positions | None]:
        """Check the decoder's inputs. Return the token embeddings and the positions of the tokens."""
        check_tokens("tokens", tokens, self.config.vocab_size)
        batch, length = tokens.shape
        checked = None if positions is None else Positions.of(positions, length=length, batch=batch)
        x = self.embedding(tokens)
        if self.config.embedding_scale != 1.0:
            x = x * self.config.embedding_scale
        if self.position is not None:
            following = cache.positions(length) if checked is None and cache is not None else checked
            token_positions = positions_in_documents(range(length) if following is None else following, mask)
            if isinstance(token_positions, range) and token_positions and token_positions[-1] >= self.config.max_len:
                hint = "there are only that many learned position vectors"
                rule = f"be at most {self.config.max_len} long"
                raise value_error("text", rule, token_positions[-1] + 1, hint=hint)
            x = x + self.position(token_positions)
        if self._trained_len is not None and not is_tracing():
            self._warn_beyond(length, mask, cache)
        return self.dropout(x), checked

    def _warn_beyond(self, length: int, mask: object, cache: Cache | None) -> None:
        """Warn once if tokens may attend to tokens farther away than the trained length."""
        assert self._trained_len is not None
        end = (0 if cache is None else cache.length) + length
        masks = dict.fromkeys(pattern.mask for pattern in self.config.layer_patterns if pattern.rotary)
        rules = [rule & mask if isinstance(mask, Mask) else rule for rule in masks if rule is not None]
        if any(warn_beyond(self._trained_len, end, rule, cache) for rule in rules):
            self._trained_len = None

    @classmethod
    def _build(cls, config: Mapping[str, Any], *given: Any) -> Self:
        model = super()._build(config, *given)
        if model.config.position_encoding == "rotary":
            model._trained_len = model.config.max_len
        return model


def _layers(config: DecoderConfig) -> list[DecoderLayer]:
    sources = range(config.num_layers) if config.kv_layers is None else config.kv_layers
    each = enumerate(zip(config.layer_patterns, sources, strict=True))
    return [_layer(config, pattern, None if source == index else source) for index, (pattern, source) in each]


def _layer(config: DecoderConfig, pattern: LayerPattern, source: int | None) -> DecoderLayer:
    rotary: Rotary | None = None
    bias: Bias | None = None
    head_dim = config.width_of_head
    if pattern.rotary:
        base, scaling = pattern.rotary_base, pattern.rotary_scaling
        rotary = Rotary(head_dim, base=base, layout=config.rotary_layout, scaling=scaling)
    elif config.position_encoding == "alibi":
        bias = ALiBi(config.num_heads)
    elif config.position_encoding == "relative":
        bias = ShawKeys(head_dim, (config.max_len - 1, 0), config.num_heads)
    options: dict[str, Any] = {
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "mask": pattern.mask,
        "mechanism": Softmax(bias=bias, scale=config.attention_scale, softcap=config.softcap),
        "rotary": rotary,
        "qk_norm": config.qk_norm if pattern.uses_qk_norm else None,
        "temperature": pattern.temperature,
        "dropout_p": config.attention_dropout_p,
        "projection_bias": config.attention_bias,
    }
    attention: AttentionLayer
    if source is None:
        convolution = config.short_convolution
        attention = MultiHeadAttention(config.embed_dim, config.num_heads, short_convolution=convolution, **options)
    else:
        attention = SharedKeyAttention(config.embed_dim, config.num_heads, source, **options)
    return DecoderLayer(
        attention,
        _feed_forward(config, pattern),
        **{name: getattr(config, name) for name in ("norm", "norm_eps", "norm_first", "part_norm", "parallel")},
        dropout_p=config.dropout_p,
    )


def _feed_forward(config: DecoderConfig, pattern: LayerPattern) -> FeedForward | MixtureOfExperts:
    width, activation = config.embed_dim, config.activation
    if config.num_experts is not None and pattern.uses_experts:
        hidden = config.feed_forward_dim if config.expert_dim is None else config.expert_dim
        chosen = config.num_chosen_experts
        return MixtureOfExperts(width, hidden, config.num_experts, num_chosen=chosen, activation=activation)
    return FeedForward(
        width,
        config.feed_forward_dim,
        activation=activation,
        gated=config.gated,
        projection_bias=config.feed_forward_bias,
    )
