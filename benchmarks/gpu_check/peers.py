"""The other side of each time: torch's own backends, each forced, and none of them by default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen
from torch.nn.attention import flex_attention as flex

from benchmarks.gpu_check.device import Device
from benchmarks.gpu_check.scenes import Scene
from saccade import masks
from saccade.integrations.flex import block_mask

__all__ = ["COMPILED", "PEERS", "RefusedError", "peer"]

Attention = Callable[..., Tensor]
_LARGEST_MASK = 1 << 28  # bytes of a bool tensor of pairs


class RefusedError(Exception):
    """A backend does not do what is timed; the message says why."""


def peer(name: str, scene: Scene, device: Device) -> Attention:
    """Return a backend as a function of query, key and value.

    Raises:
        RefusedError: it does not do this, or takes too much memory for it.
    """
    return PEERS[name](scene, device)


def _sdpa(backend: SDPBackend) -> Callable[[Scene, Device], Attention]:
    def made(scene: Scene, device: Device) -> Attention:
        seen, is_grouped = None, scene.heads[0] != scene.heads[1]
        if scene.kind not in ("full", "causal", "decode"):
            if backend is SDPBackend.FLASH_ATTENTION:
                raise RefusedError("it takes no mask")
            if scene.length**2 > _LARGEST_MASK:
                raise RefusedError(f"its mask would take {scene.length**2 / 2**30:.0f} GiB")
            assert scene.mask is not None
            index = torch.arange(scene.length, device=device.name)
            seen = scene.mask.allows(index[0], index[0], index[:, None], index)

        def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(
                    query, key, value, seen, is_causal=scene.kind == "causal", enable_gqa=is_grouped
                )

        return run

    return made


def _varlen(scene: Scene, device: Device) -> Attention:
    if scene.kind not in ("documents", "window", "causal"):
        raise RefusedError("it takes windows of whole sequences")
    sizes = scene.documents if scene.kind == "documents" else [scene.length]
    ends = torch.tensor([0, *sizes], device=device.name).cumsum(0).to(torch.int32)
    window = (scene.size - 1 if scene.kind == "window" else -1, 0)

    def run(*tensors: Tensor) -> Tensor:
        flat = (x[0].transpose(0, 1) for x in tensors)
        return varlen.varlen_attn(*flat, ends, ends, max(sizes), max(sizes), window_size=window).transpose(0, 1)[None]

    return run


def _flex(backend: str, block_size: tuple[int, int]) -> Callable[[Scene, Device], Attention]:
    def made(scene: Scene, device: Device) -> Attention:
        knows = getattr(flex, "FlexKernelOptions", None)
        if backend == "FLASH" and (knows is None or "BACKEND" not in knows.__annotations__):
            raise RefusedError("this torch has no such option")
        mask = masks.Full() if scene.mask is None else scene.mask
        blocks = block_mask(mask, scene.q_len, scene.length, block_size=block_size, device=device.name)
        compiled = torch.compile(flex.flex_attention, fullgraph=True, dynamic=False, backend=device.compiler)
        options: dict[str, Any] = {"enable_gqa": scene.heads[0] != scene.heads[1], "block_mask": blocks}
        if device.name == "cuda" and backend == "FLASH":
            options["kernel_options"] = {"BACKEND": "FLASH"}
        return lambda *tensors: compiled(*tensors, **options)

    return made


PEERS = {
    "FLASH": _sdpa(SDPBackend.FLASH_ATTENTION),
    "CUDNN": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "EFFICIENT": _sdpa(SDPBackend.EFFICIENT_ATTENTION),
    "varlen": _varlen,
    "Flex": _flex("TRITON", (128, 128)),
    "Flex FLASH": _flex("FLASH", (256, 128)),
}
COMPILED = ("Flex", "Flex FLASH")
