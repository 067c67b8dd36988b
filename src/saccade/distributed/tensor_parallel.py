"""tp_plan(): split saccade's layers across ranks with torch's tensor parallelism."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from saccade.nn import DecoderStack, FeedForward, MultiHeadAttention
from saccade.nn.base_layer import AttentionLayer
from saccade.support.errors import unsupported
from saccade.support.validation import check_int, check_type


def tp_plan(model: nn.Module, degree: int) -> dict[str, ParallelStyle]:
    """Return a tensor-parallel plan for a model, for ``torch.distributed.tensor.parallel.parallelize_module``.

    Every rank gets some heads of each attention layer and some inner channels of each feed-forward network; all other
    parameters are replicated. With fewer key heads than ranks, several ranks share a head, and its gradients are
    summed. If the sequence is split as well, call `parallelize` first.

    Args:
        model: a model with layers of `saccade.nn`.
        degree: number of ranks that share each layer.

    Returns:
        Parallel styles by module name.

    Raises:
        UnsupportedError: heads or channels are not divisible by the number of ranks, or heads differ in more than their
            projections. The error lists all layers that cannot be split.

    Cost: for each layer, an all-reduce of its output in the forward pass and of its input's gradient in the backward
    pass.

    Example:
        >>> from saccade.nn import EncoderLayer
        >>> layer = EncoderLayer(MultiHeadAttention(16, 4, num_kv_heads=1), FeedForward(16, 32))
        >>> {name: type(style).__name__ for name, style in tp_plan(layer, 2).items() if "contract" not in name}
        {'attention.query_projection': 'ColwiseParallel', 'attention.key_projection': 'SharedHead', \
'attention.value_projection': 'SharedHead', 'attention.output_projection': 'RowwiseParallel', \
'feed_forward.expand': 'ColwiseParallel'}

    Reference: Shoeybi et al. 2019, arXiv:1909.08053, section 3.
    """
    check_type("model", model, nn.Module, "be a module")
    check_int("degree", degree)
    plan: dict[str, ParallelStyle] = {}
    reasons: list[str] = []
    for name, part in model.named_modules():
        prefix, label = f"{name}." if name else "", name or type(model).__name__
        if isinstance(part, AttentionLayer):
            reasons += [f"{label}: {why}" for why in _reasons_against(part, degree)]
        if isinstance(part, DecoderStack) and part.value_weights is not None:
            reasons.append(f"{label}: its value_weights would get the gradient of each rank's heads only")
        if isinstance(part, MultiHeadAttention) and part.num_kv_heads:
            shared = part.num_kv_heads < degree
            keys: ParallelStyle = SharedHead(part.num_kv_heads) if shared else ColwiseParallel()
            plan[f"{prefix}query_projection"] = ColwiseParallel()
            plan |= {f"{prefix}{which}_projection": keys for which in ("key", "value")}
            plan[f"{prefix}output_projection"] = RowwiseParallel()
            if part.gate_projection is not None:
                plan[f"{prefix}gate_projection"] = ColwiseParallel()
        elif isinstance(part, FeedForward):
            if part.hidden_dim % degree:
                reasons.append(f"{label}: {degree} ranks do not divide {part.hidden_dim} channels")
            plan |= {f"{prefix}{which}": ColwiseParallel() for which in ("expand", "gate") if getattr(part, which)}
            plan[f"{prefix}contract"] = RowwiseParallel()
    if not plan:
        reasons.append("it has no MultiHeadAttention and no FeedForward of saccade.nn")
    if reasons:
        raise unsupported(type(model).__name__, reasons)
    return plan


class SharedHead(ParallelStyle):
    """A tensor-parallel style that replicates key or value projections that have fewer heads than ranks.

    Args:
        heads: number of heads, a divisor of the number of ranks.
    """

    def __init__(self, heads: int):
        super().__init__()
        self.heads = check_int("heads", heads)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        whole = (Replicate(),)
        for name, parameter in list(module.named_parameters()):
            replicated = distribute_tensor(parameter, device_mesh, whole)
            module.register_parameter(name, nn.Parameter(replicated, requires_grad=parameter.requires_grad))

        def before(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return (DTensor.from_local(inputs[0], device_mesh, whole, run_check=False), *inputs[1:])

        def after(_: nn.Module, __: tuple[Any, ...], out: DTensor) -> Tensor:
            # Each rank has the gradient of the head that it uses.
            local = out.to_local(grad_placements=(Partial(),))
            width = local.shape[-1] // self.heads
            head = device_mesh.get_local_rank() * self.heads // device_mesh.size()
            return local.narrow(-1, head * width, width)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
        return module


def _reasons_against(layer: AttentionLayer, degree: int) -> list[str]:
    """Return the reasons why the heads of a layer cannot be split across ranks; the list is empty if they can."""
    if type(layer) is not MultiHeadAttention:
        return [f"{type(layer).__name__} cannot be split by heads; only MultiHeadAttention can"]
    why, kv_heads = [], layer.num_kv_heads
    if layer.num_heads % degree:
        why.append(f"{degree} ranks do not divide {layer.num_heads} heads")
    if kv_heads % degree and degree % kv_heads:
        why.append(f"{degree} ranks do not divide {kv_heads} key heads, and {kv_heads} does not divide {degree}")
    if not layer.mechanism.treats_heads_alike:
        why.append(f"its {layer.mechanism} differs between heads, and each rank would have different heads")
    if layer.qk_norm is not None and (layer.qk_norm.learned or layer.qk_norm.across == "all_heads"):
        why.append("its norm of queries and keys combines heads, in its weights or its mean")
    if layer.mask is not None and layer.mask.shape[1] > 1:
        why.append("its mask differs between heads, and each rank would have different heads")
    return why
