"""An LSTM as a layer that mixes tokens."""

from torch import Tensor, nn

__all__ = ["LSTM"]


class LSTM(nn.Module):
    """``torch.nn.LSTM``, whose outputs alone are returned.

    Args:
        width: of inputs and outputs.
    """

    def __init__(self, width: int):
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, length, width]`` to the same."""
        out: Tensor = self.lstm(x)[0]
        return out
