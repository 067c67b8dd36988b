"""An encoder of the BERT family whose attention can be looked at."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn

from saccade.masks import Padding
from saccade.matrix import Matrix
from saccade.models.attention_figure import figure_of
from saccade.models.bert import Bert
from saccade.models.checkpoint_folder import check_types, read_config, write_folder
from saccade.models.config import EncoderConfig
from saccade.models.init import start_small
from saccade.models.loading import built, load, words_of
from saccade.models.token_inputs import check_tokens, in_own_texts
from saccade.nn import EncoderLayer, FeedForward, MultiHeadAttention
from saccade.nn.stack import with_inputs
from saccade.positions.token_positions import Positions
from saccade.support.argument_hints import AnswersCalls
from saccade.support.errors import type_error, value_error
from saccade.support.validation import ShapeSpec, check_type
from saccade.text import words

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from tokenizers import Tokenizer

__all__ = ["Encoder"]

_TYPES = ShapeSpec("tokens [batch, len]", "token_types [batch, len]")


class Encoder(AnswersCalls, nn.Module):
    """Embeddings and a stack of post-norm layers, as BERT has them.

    Args:
        config: its sizes.
        tokenizer: makes tokens of text; `tokenize` needs it, nothing else does.

    Cost: O(num_layers * (len * embed_dim ** 2 + len ** 2 * embed_dim)) time; memory linear in len.

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

    def __init__(self, config: EncoderConfig, tokenizer: "Tokenizer | None" = None):
        super().__init__()
        self.config = check_type("config", config, EncoderConfig, "be a saccade.models.EncoderConfig")
        self.tokenizer = tokenizer
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(_layer(config) for _ in range(config.num_layers))
        start_small(self)

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str]) -> Self:
        """Load a published model from a folder on disk, in float32 and eval mode.

        Reads ``config.json``, ``model.safetensors`` and, where there is one, ``tokenizer.json``; pickled weights
        never. A pooler or a task's head in the file is left alone; anything else must fit exactly.

        Args:
            path: the folder.

        Raises:
            UnsupportedError: not a BERT encoder as we compute it; every reason is listed.
            ValueError: a file is missing or broken, or the weights do not fit the configuration.
            ImportError: safetensors or tokenizers is not installed.
        """
        folder = Path(path)
        told = read_config(folder)
        if told.get("model_type", "bert") == "bert":  # others are refused by their name, whatever else they say
            check_types(told)
        return load(folder, told, Bert(), cls)

    @classmethod
    def from_state_dict(
        cls,
        config: object,
        state_dict: Mapping[str, Tensor],
        *,
        tokenizer: "Tokenizer | None" = None,
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """The model of weights that are in memory, in eval mode; they are copied.

        Args:
            config: what the model's ``config.json`` says, as a dict, or a config of transformers.
            state_dict: the tensors under their published names, as `from_pretrained` reads them, in any dtype of
                floats: of transformers' ``BertModel`` for instance.
            tokenizer: kept with the model.
            dtype: of the model.

        Raises:
            UnsupportedError, ValueError: as in `from_pretrained`.
            TypeError: no config, no tensors, or a dtype that is no float's.
        """
        told = words_of(config)
        return built(told, state_dict, Bert(), cls, dtype, tokenizer)

    def save_pretrained(self, path: str | os.PathLike[str]) -> None:
        """Write the model to a folder as BERT's are written; transformers' ``BertModel`` reads it too.

        Files are written under other names and then renamed, so that a reader finds an old file or a new one, never
        half of one.

        Args:
            path: the folder; made if there is none. Files of other names in it are left alone.

        Raises:
            ImportError: safetensors is not installed.
        """
        form = Bert()
        state = {own: weight.detach().cpu() for own, weight in self.state_dict().items()}
        words = form.write_config(self.config)
        write_folder(Path(path), words, form.write_weights(state), self.tokenizer)

    def forward(self, tokens: Tensor, *, mask: object = None, token_types: Tensor | None = None) -> Tensor:
        """Encode.

        Args:
            tokens: int ``[batch, len]``, at most ``config.max_len`` long.
            mask: who may attend to whom, anything that `saccade.attention` takes; ``Padding(lengths)`` for a
                batch of sequences of different lengths.
            token_types: int ``[batch, len]``; all 0 when None.

        Returns:
            ``[batch, len, embed_dim]``.

        Raises:
            TypeError: tokens are not integers.
            ValueError: another shape, or too long.
        """
        hidden = self._embedded(tokens, mask, token_types)
        for layer in self.layers:
            hidden = layer(hidden, mask=mask)
        return hidden

    def matrices(self, tokens: Tensor, *, mask: object = None, token_types: Tensor | None = None) -> list[Matrix]:
        """Say who attends to whom in every layer when `forward` gets the same arguments.

        Returns:
            One matrix per layer, ``[batch, num_heads, len, len]``; lazy, so nothing of that size is built.

        Cost: a forward pass; memory linear in len.
        """
        inputs = with_inputs(self.layers, self._embedded(tokens, mask, token_types), mask=mask)
        return [layer.matrix(hidden, mask=mask) for layer, hidden in inputs]

    def embed(self, tokens: Tensor, lengths: Sequence[int] | Tensor, *, normalize: bool = True) -> Tensor:
        """Make one vector of each sequence: the mean of its real tokens' hidden states.

        Args:
            tokens: int ``[batch, len]``, right padded, as `tokenize` returns them.
            lengths: real tokens of each sequence.
            normalize: scale each vector to length 1, as MiniLM's sentence embeddings are.

        Returns:
            ``[batch, embed_dim]``; zeros for a sequence without tokens.

        Raises:
            ValueError: not one length per sequence, or one beyond ``len``.
        """
        check_tokens("tokens", tokens)
        mask = Padding(lengths)
        batch, longest = tokens.shape
        if len(mask.lengths) != batch or max(mask.lengths) > longest:
            rule = f"be one for each of the {batch} sequences, at most {longest}"
            raise value_error("lengths", rule, list(mask.lengths))
        hidden = self(tokens, mask=mask)
        counts = torch.tensor(mask.lengths, device=hidden.device)[:, None]  # [batch, 1]
        is_real = torch.arange(longest, device=hidden.device) < counts  # [batch, len]
        mean = hidden.masked_fill(~is_real[..., None], 0).sum(1) / counts.clamp(min=1)
        return nn.functional.normalize(mean, dim=-1) if normalize else mean

    def tokenize(self, sentences: Sequence[str]) -> tuple[Tensor, tuple[int, ...]]:
        """Make tokens of sentences, with the special tokens that the model was trained with.

        Returns:
            Tokens, int64 ``[batch, len]``, right padded, and the length of each sentence without padding.

        Raises:
            TypeError: one string instead of a list of them.
            ValueError: no tokenizer, no sentence, or one that is longer than ``config.max_len`` tokens.
        """
        if isinstance(sentences, str):
            hint = "[sentence] is a batch of one."
            raise type_error("sentences", "be a list of strings", "one string", hint=hint)
        if self.tokenizer is None:
            raise value_error("tokenizer", "be there", None, hint="the model's folder had no tokenizer.json.")
        if not sentences:
            raise value_error("sentences", "have at least one", "none")
        encoded = [torch.tensor(one.ids) for one in self.tokenizer.encode_batch(list(sentences))]
        lengths = tuple(len(ids) for ids in encoded)
        if max(lengths) > self.config.max_len:
            got = f"{max(lengths)} (sentence {lengths.index(max(lengths)) + 1})"
            raise value_error("sentences", f"have at most {self.config.max_len} tokens each", got)
        padded = nn.utils.rnn.pad_sequence(encoded, batch_first=True, padding_value=self.config.pad_token)
        return padded.to(next(self.parameters()).device), lengths

    def show(self, text: str, *, layer: int | None = None, head: int | None = None) -> "Figure":
        """Draw what each word of a text looks at, in the head that tells most about it.

        Which head that is, is decided among words, without special tokens, by
        `saccade.statistics.unexplained_information`: what neither distance nor everybody's favourite words explain.
        Texts of more than 512 tokens are compared by pooled maps and drawn token by token.

        Args:
            text: at most ``config.max_len`` tokens long.
            layer, head: which to draw, counted from 0; None for the most telling.

        Returns:
            A figure as `saccade.viz.heatmap` draws it; `saccade.viz.save` writes it.

        Raises:
            TypeError: no text.
            ValueError: no tokenizer, a text without words or too long, or a layer or head that is not there.
            ImportError: matplotlib is not installed.

        Cost: a forward pass, and the weights of one layer at a time; of a long text, a sweep over each layer.
        """
        check_type("text", text, str, "be a string")
        tokens, _ = self.tokenize([text])
        assert self.tokenizer is not None  # or tokenize had refused
        found = words(self.tokenizer.encode(text), text)
        with torch.no_grad():
            matrices = self.matrices(tokens)
        return figure_of(matrices, found, layer=layer, head=head)

    def _embedded(self, tokens: Tensor, mask: object, token_types: Tensor | None) -> Tensor:
        check_tokens("tokens", tokens)
        places = in_own_texts(range(tokens.shape[1]), mask)
        longest = len(places) if isinstance(places, range) else int(places.max()) + 1
        if longest > self.config.max_len:
            raise value_error("tokens", f"be at most {self.config.max_len} long", longest)
        if token_types is not None:
            check_tokens("token_types", token_types)
            _TYPES.check(tokens, token_types)
        return self.embeddings(tokens, token_types, places)


class Embeddings(nn.Module):
    """The normalised sum of three vectors: for the token, for its position and for its segment."""

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
        """Embed.

        Args:
            tokens: int ``[batch, len]``.
            token_types: int ``[batch, len]``; all 0 when None.
            positions: where the tokens stand in their own texts, from 0 on when None; -1 outside of all.

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
