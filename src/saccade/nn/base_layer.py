"""The base classes of layers: `Layer`, and `AttentionLayer` for layers with a mask, a mechanism and dropout."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Never

from torch import Tensor, nn

from saccade.caches import LayerCache
from saccade.masks import Mask, as_mask
from saccade.masks.rules.documents import joined_with_batch_mask
from saccade.matrix import Matrix
from saccade.mechanisms import Mechanism, Softmax
from saccade.positions import Bias
from saccade.positions.token_positions import GivenPositions
from saccade.support.argument_hints import ArgumentHints
from saccade.support.errors import torchscript_unsupported, unsupported
from saccade.support.validation import check_type


class Layer(nn.Module):
    """An ``nn.Module`` whose calls return a tensor, so that type checkers know the result type.

    The code of a decoding step reads submodules from ``_modules``: torch finds ``self.name`` only after the usual
    lookup has failed, which takes as long as a small operation.
    """

    if TYPE_CHECKING:
        _modules: dict[str, Any]

        def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...

    def _slow_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer while ``torch.jit.trace`` traces it.

        Raises:
            UnsupportedError: more positional arguments than the layer accepts, because the TorchScript-based ONNX
                exporter passes all arguments by position.
        """
        parameters = inspect.signature(self.forward).parameters.values()
        if len(args) > sum(x.kind is x.POSITIONAL_OR_KEYWORD for x in parameters):
            raise torchscript_unsupported()
        return super()._slow_forward(*args, **kwargs)

    def __prepare_scriptable__(self) -> Never:
        """Refuse ``torch.jit.script``, which calls this method.

        Raises:
            UnsupportedError: always.
        """
        raise torchscript_unsupported()


class AttentionLayer(ArgumentHints, Layer):
    """The base class of attention layers, which map ``[batch, len, embed_dim]`` to the same shape.

    Args:
        embed_dim: width of queries and of the output.
        num_heads: number of heads in the attention matrix.
        mask: mask of the module; combined with the mask of each call by ``&``.
        mechanism: computes the attention matrix; `saccade.mechanisms.Softmax` if None.
        dropout_p: dropout of the attention weights, in training only; subclasses check its range.

    Attributes:
        source: index of the earlier layer of a stack whose keys or selection the layer reads in each call, passed as
            ``shared``; None if it reads none.
    """

    output_projection: nn.Linear
    source: int | None = None

    def __init__(
        self, embed_dim: int, num_heads: int, mask: Mask | None, mechanism: Mechanism | None, dropout_p: float
    ):
        super().__init__()
        if mask is not None:
            hint = "a tensor or function belongs to one batch: pass it to the call"
            check_type("mask", mask, Mask, "be a saccade mask", hint=hint)
        if mechanism is not None:
            hint = "for instance saccade.mechanisms.Softmax(softcap=30.0)"
            check_type("mechanism", mechanism, Mechanism, "be a saccade Mechanism or None", hint=hint)
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.dropout_p = float(dropout_p)
        self.mask = mask
        self.mechanism = Softmax() if mechanism is None else mechanism

    @abstractmethod
    def matrix(
        self,
        query: Tensor,
        *,
        mask: object = None,
        positions: GivenPositions = None,
        bias: Tensor | Bias | None = None,
    ) -> Matrix:
        """Return the layer's lazy self-attention matrix for ``query``, ``[batch, num_heads, len, len]``."""

    def reset_parameters(self) -> None:
        """Initialize the projections with Xavier-uniform weights and zero biases, as in ``nn.MultiheadAttention``."""
        for projection in self.children():
            if isinstance(projection, nn.Linear):
                nn.init.xavier_uniform_(projection.weight)
                if projection.bias is not None:
                    nn.init.zeros_(projection.bias)

    def new_cache(self, max_len: int | None = None) -> LayerCache:
        """Return an empty cache for the attention layer.

        Args:
            max_len: number of tokens to allocate memory for in advance; if None, the cache grows as needed.
        """
        return self.mechanism.new_cache(max_len)

    def _joined(self, mask: object, shape: tuple[int, int, int, int]) -> Mask | None:
        """Combine the layer's mask with that of a call. Raise an error if the mechanism does not support the result."""
        joined = self.mask
        if mask is not None:
            batch_mask = as_mask(mask, shape)
            joined = batch_mask if self.mask is None else joined_with_batch_mask(self.mask, batch_mask)
        if joined is not None:
            reasons = self._modules["mechanism"].reasons(joined)
            if reasons:
                raise unsupported(type(self.mechanism).__name__, reasons)
        return joined
