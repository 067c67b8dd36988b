"""Encoder: a text encoder of the BERT family."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from saccade.masks import Padding
from saccade.masks.rules.documents import positions_in_documents
from saccade.matrix import Matrix
from saccade.models.attention_figure import figure_of, warn_of_unknown_words
from saccade.models.config import EncoderConfig
from saccade.models.initial_weights import init_small_weights
from saccade.models.model_inputs import check_tokens
from saccade.models.pretrained import SavedText
from saccade.models.text_formats import Bert
from saccade.nn import EncoderLayer, FeedForward, MultiHeadAttention
from saccade.nn.stack import with_inputs
from saccade.positions.token_positions import Positions
from saccade.support.errors import type_error, value_error
from saccade.support.validation import ShapeSpec, check_type
from saccade.text import words

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from tokenizers import Tokenizer

_TYPES = ShapeSpec("tokens [batch, len]", "token_types [batch, len]")


class Encoder(SavedText):
    """A text encoder: embeddings and a stack of post-norm layers, as in BERT.

    `from_pretrained` and `save_pretrained` read and write BERT's format, so transformers' ``BertModel`` can load saved
    folders. A pooler or task head in a file is ignored; all other weights must match exactly.

    Args:
        config: sizes and options of the model.
        tokenizer: used by `tokenize` and `show` only.

    Cost: O(num_layers * (len * embed_dim ** 2 + len ** 2 * embed_dim)) time, and memory that is linear in len.

    Example:
        >>> config = EncoderConfig(
        ...     vocab_size=100, max_len=32, embed_dim=16, num_heads=4, num_layers=2, feed_forward_dim=64
        ... )
        >>> encoder = Encoder(config).eval()
        >>> tokens = torch.tensor([[1, 2, 3]])
        >>> encoder(tokens).shape
        torch.Size([1, 3, 16])
        >>> [matrix.shape for matrix in encoder.matrices(tokens)]
        [(1, 4, 3, 3), (1, 4, 3, 3)]

    Reference: Devlin et al. 2019, arXiv:1810.04805.
    """

    formats = {"bert": Bert()}
    default_type = "bert"
    written_types = ("bert",)

    def __init__(self, config: EncoderConfig, tokenizer: "Tokenizer | None" = None):
        super().__init__()
        self.config = check_type("config", config, EncoderConfig, "be a saccade.models.EncoderConfig")
        self.tokenizer = tokenizer
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(_layer(config) for _ in range(config.num_layers))
        init_small_weights(self)

    def forward(self, tokens: Tensor, *, mask: object = None, token_types: Tensor | None = None) -> Tensor:
        """Return the hidden states of the encoder's last layer.

        Args:
            tokens: int ``[batch, len]``, at most ``config.max_len`` long.
            mask: which tokens may attend to which others, as in `saccade.attention`; ``Padding(lengths)`` for sequences
                of different lengths.
            token_types: int ``[batch, len]``; all 0 if None.

        Returns:
            ``[batch, len, embed_dim]``.

        Raises:
            TypeError: tokens are not integers.
            ValueError: an input has the wrong shape or is too long.
        """
        hidden = self._embedded(tokens, mask, token_types)
        for layer in self.layers:
            hidden = layer(hidden, mask=mask)
        return hidden

    @torch.no_grad()
    def matrices(self, tokens: Tensor, *, mask: object = None, token_types: Tensor | None = None) -> list[Matrix]:
        """Return the attention matrices that `forward` uses in the encoder's layers.

        Returns:
            One lazy matrix per layer, ``[batch, num_heads, len, len]``, without gradients. For gradients, use
            ``saccade.record(model, keep="gradients")``.

        Cost: a forward pass without gradients, and memory that is linear in len.
        """
        inputs = with_inputs(self.layers, self._embedded(tokens, mask, token_types), mask=mask)
        return [layer.matrix(hidden, mask=mask) for layer, hidden in inputs]

    def embed(self, tokens: Tensor, lengths: Sequence[int] | Tensor, *, normalize: bool = True) -> Tensor:
        """Return one vector for each sequence: the mean of the encoder's hidden states, excluding padding.

        Args:
            tokens: int ``[batch, len]``, padded on the right, as `tokenize` returns them.
            lengths: length of each sequence without padding.
            normalize: whether to scale each vector to norm 1, as in MiniLM's sentence embeddings.

        Returns:
            ``[batch, embed_dim]``; zeros for a sequence without tokens.

        Raises:
            ValueError: the number of lengths differs from the number of sequences, or a length exceeds ``len``.
        """
        check_tokens("tokens", tokens)
        mask = Padding(lengths)
        batch, longest = tokens.shape
        if len(mask.lengths) != batch or max(mask.lengths) > longest:
            rule = f"be one for each of the {batch} sequences, at most {longest}"
            raise value_error("lengths", rule, list(mask.lengths))
        hidden = self(tokens, mask=mask)
        counts = torch.tensor(mask.lengths, device=hidden.device)[:, None]  # [batch, 1]
        valid = torch.arange(longest, device=hidden.device) < counts  # [batch, len]
        mean = hidden.masked_fill(~valid[..., None], 0).sum(1) / counts.clamp(min=1)
        return nn.functional.normalize(mean, dim=-1) if normalize else mean

    def tokenize(self, sentences: Sequence[str]) -> tuple[Tensor, tuple[int, ...]]:
        """Tokenize sentences with the special tokens that the encoder was trained with.

        Returns:
            Tokens, int64 ``[batch, len]``, padded on the right, and the length of each sentence without padding.

        Raises:
            TypeError: ``sentences`` is a string instead of a list of strings.
            ValueError: the model has no tokenizer, there is no sentence, or a sentence exceeds ``config.max_len``
                tokens.
        """
        if isinstance(sentences, str):
            hint = "[sentence] is a batch of one."
            raise type_error("sentences", "be a list of strings", "one string", hint=hint)
        if self.tokenizer is None:
            raise value_error("tokenizer", "be present", None, hint="the model's folder had no tokenizer.json.")
        if not sentences:
            raise value_error("sentences", "contain at least one sentence", "none")
        sequences = [torch.tensor(encoding.ids) for encoding in self.tokenizer.encode_batch(list(sentences))]
        lengths = tuple(map(len, sequences))
        if max(lengths) > self.config.max_len:
            got = f"{max(lengths)} (sentence {lengths.index(max(lengths)) + 1})"
            raise value_error("sentences", f"have at most {self.config.max_len} tokens each", got)
        padded = nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=self.config.pad_token)
        return padded.to(next(self.parameters()).device), lengths

    def show(
        self,
        text: str,
        *,
        layer: int | None = None,
        head: int | None = None,
        hide_special: bool = False,
        title: str | None = None,
    ) -> "Figure":
        """Draw the attention between the words of a text, in the encoder's most informative head.

        This is the head with the largest `saccade.statistics.unexplained_information` between words (special tokens are
        excluded): the head whose attention is least explained by distance and by words to which most words attend. If a
        text has more than 512 tokens, heads are compared by pooled maps, and the chosen head is drawn token by token.

        Args:
            text: the text, at most ``config.max_len`` tokens long.
            layer, head: the head to draw, counted from 0; None for the most informative.
            hide_special: whether to leave special tokens such as [CLS] out of the figure; other weights are unchanged.
                A text of more than 512 tokens is always drawn with them.
            title: the title; None for a description, which names the layer and the head. If a title is given, the
                description is drawn below it, in smaller letters.

        Returns:
            A figure from `saccade.viz.heatmap`, which `saccade.viz.save` can write to a file.

        Warns:
            UserWarning: once per process, if more than a quarter of the words are not in the vocabulary, such as those
                of a Chinese text in an English model.

        Raises:
            TypeError: ``text`` is not a string.
            ValueError: the model has no tokenizer, the text has no words or is too long, the layer or head does not
                exist, or ``hide_special`` is set for more than 512 tokens.
            ImportError: matplotlib is not installed.

        Cost: a forward pass, plus the weights of one layer at a time; for a long text, one pass over each layer's
        matrix.
        """
        check_type("text", text, str, "be a string")
        tokens, _ = self.tokenize([text])
        assert self.tokenizer is not None  # otherwise tokenize has raised
        labels = words(self.tokenizer.encode(text), text)
        warn_of_unknown_words(text, labels)
        with torch.no_grad():
            matrices = self.matrices(tokens)
        return figure_of(matrices, labels, layer=layer, head=head, hide_special=hide_special, title=title)

    def _embedded(self, tokens: Tensor, mask: object, token_types: Tensor | None) -> Tensor:
        check_tokens("tokens", tokens)
        positions = positions_in_documents(range(tokens.shape[1]), mask)
        longest = len(positions) if isinstance(positions, range) else int(positions.max()) + 1
        if longest > self.config.max_len:
            raise value_error("tokens", f"be at most {self.config.max_len} long", longest)
        if token_types is not None:
            check_tokens("token_types", token_types)
            _TYPES.check(tokens, token_types)
        return self.embeddings(tokens, token_types, positions)


class Embeddings(nn.Module):
    """The encoder's input embeddings: the normalised sum of token, position and segment embeddings."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.word = nn.Embedding(config.vocab_size, config.embed_dim, padding_idx=config.pad_token)
        self.position = nn.Embedding(config.max_len, config.embed_dim)
        self.token_type = nn.Embedding(config.num_token_types, config.embed_dim)
        self.norm = nn.LayerNorm(config.embed_dim, eps=config.norm_eps)
        self.dropout = nn.Dropout(config.dropout_p)

    def forward(
        self, tokens: Tensor, token_types: Tensor | None = None, positions: range | Tensor | None = None
    ) -> Tensor:
        """Return the encoder's input embeddings for tokens.

        Args:
            tokens: int ``[batch, len]``.
            token_types: int ``[batch, len]``; all 0 if None.
            positions: positions of the tokens within their documents, counted from 0; -1 outside all documents. If
                None, the tokens form one document.

        Returns:
            ``[batch, len, embed_dim]``.
        """
        table = Positions.of(range(tokens.shape[1]) if positions is None else positions).on(tokens.device)
        types = torch.zeros_like(tokens) if token_types is None else token_types
        total = self.word(tokens) + self.token_type(types) + self.position(table.clamp(min=0))
        return self.dropout(self.norm(total))


def _layer(config: EncoderConfig) -> EncoderLayer:
    return EncoderLayer(
        MultiHeadAttention(config.embed_dim, config.num_heads, dropout_p=config.attention_dropout_p),
        FeedForward(config.embed_dim, config.feed_forward_dim, activation=config.activation),
        norm_eps=config.norm_eps,
        norm_first=False,
        dropout_p=config.dropout_p,
    )
