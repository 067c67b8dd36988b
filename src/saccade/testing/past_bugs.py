"""`PAST_BUGS`: mistakes from public bug reports, each with a small kernel that reproduces it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.testing.past_bug import PastBug
from saccade.testing.stateful_wrong_kernels import (
    by_some_entries,
    cached_by,
    copied_once,
    empty_splits,
    first_lengths,
    reads_past_the_end,
    switched,
    unwritten,
    unwritten_gradients,
    unwritten_rows,
    with_backward,
)
from saccade.testing.wrong_kernels import (
    as_contiguous,
    attend,
    cached,
    complete_blocks,
    every_second_call,
    first_of_group,
    gradient_times,
    interleaved,
    last_block_gradient,
    last_result,
    low_maximum,
    no_maximum,
    scaled_in_place,
    split_sum,
    stale_mask,
    with_changed_inputs,
    with_changed_output,
    workspace,
    wrong_if,
    zero_tail,
)


def _items_a_token_apart(x: Tensor) -> Tensor:
    """Return the tensor as read by a kernel that assumes each batch item to begin one token after the previous one."""
    tokens = x.transpose(1, 2).flatten(0, 1)
    items = [tokens[start : start + x.shape[2]] for start in range(len(x))]
    return torch.stack(items).transpose(1, 2) if items else x


_ZEROS = with_changed_output(lambda out, q, k, v, mask: out * 0.0)
_NAN = with_changed_output(lambda out, q, k, v, mask: out * torch.nan)

PAST_BUGS = (
    # lengths and block edges
    PastBug("It returns zeros.", "NVIDIA/TransformerEngine#3528", ("oracle", "sizes"), _ZEROS),
    PastBug(
        "It returns NaN if the length is 64 more than a multiple of 128.",
        "pytorch/pytorch#196678",
        ("sizes",),
        wrong_if(lambda q, k, v, mask: q.shape[2] % 128 == 64, _NAN),
    ),
    PastBug(
        "Keys that pad the last block have score 0 and are not masked.",
        "flashinfer-ai/flashinfer#5090",
        ("oracle", "sizes"),
        with_changed_inputs(zero_tail),
    ),
    PastBug(
        "The last block of rows is skipped if it has one row.",
        "jax-ml/jax#27224",
        ("sizes",),
        with_changed_output(
            lambda out, q, k, v, mask: (
                torch.cat([out[:, :, :-1], out[:, :, -1:] * 0], 2)
                if out.shape[2] % 64 == 1 and out.shape[2] > 1
                else out
            )
        ),
    ),
    PastBug(
        "The last, incomplete block of keys is not read.",
        "pytorch/pytorch#159247",
        ("sizes",),
        wrong_if(lambda q, k, v, mask: k.shape[2] > 128 and k.shape[2] % 128 > 0, with_changed_inputs(complete_blocks)),
    ),
    PastBug(
        "If there are fewer queries than keys, they use the mask of the first rows.",
        "jax-ml/jax#24491",
        ("oracle", "sizes"),
        wrong_if(
            lambda q, k, v, mask: 1 < q.shape[2] < k.shape[2],
            with_changed_inputs(lambda q, k, v, mask: (q, k, v, torch.ones_like(mask).tril())),
        ),
    ),
    PastBug(
        "Only the last 512 keys are read.",
        "ScalingIntelligence/KernelBench#165",
        ("sizes",),
        with_changed_inputs(lambda q, k, v, mask: (q, k[:, :, -512:], v[:, :, -512:], mask[..., -512:])),
    ),
    PastBug(
        "Parts of more than 1,024 keys are joined without their lse.",
        "flashinfer-ai/flashinfer#50",
        ("sizes",),
        lambda: split_sum,
    ),
    # masks
    PastBug(
        "Masked pairs get the score -1e4.",
        "ml-explore/mlx#2395",
        ("large_scores",),
        lambda: lambda q, k, v, mask: attend(q, k, v, mask, fill=-1e4),
    ),
    PastBug(
        "A row without a visible key returns the mean of all values.",
        "ml-explore/mlx#2395",
        ("empty_rows", "oracle"),
        lambda: lambda q, k, v, mask: attend(q, k, v, mask | ~mask.any(-1, keepdim=True)),
    ),
    PastBug(
        "A row without a visible key returns NaN.",
        "pytorch/pytorch#103749",
        ("empty_rows", "oracle"),
        with_changed_output(lambda out, q, k, v, mask: out.masked_fill(~mask.any(-1, keepdim=True), torch.nan)),
    ),
    PastBug(
        "A single query ignores the mask.",
        "huggingface/transformers#30311",
        ("oracle",),
        wrong_if(
            lambda q, k, v, mask: q.shape[2] == 1,
            with_changed_inputs(lambda q, k, v, mask: (q, k, v, torch.ones_like(mask))),
        ),
    ),
    PastBug(
        "The mask of the first batch item is used for all.",
        "InternLM/lmdeploy#414",
        ("oracle", "batch", "sizes"),
        with_changed_inputs(lambda q, k, v, mask: (q, k, v, mask[:1].expand_as(mask))),
    ),
    PastBug(
        "The mask of an earlier call with the same shape is used.",
        "NVIDIA/Model-Optimizer#1296",
        ("oracle",),
        stale_mask,
    ),
    PastBug(
        "The mask is inverted.",
        "vllm-project/vllm-omni#672",
        ("oracle", "polarity"),
        with_changed_inputs(lambda q, k, v, mask: (q, k, v, ~mask)),
    ),
    # precision and large scores
    PastBug(
        "The running maximum begins at -5e4, so rows with lower scores become 0.",
        "flashinfer-ai/flashinfer#4267",
        ("large_scores",),
        lambda: low_maximum,
    ),
    PastBug("Scores are exponentiated without their maximum.", "made", ("large_scores",), lambda: no_maximum),
    PastBug(
        "The result has an error of one percent.",
        "Xilinx/mlir-air#1427",
        ("oracle", "sizes"),
        with_changed_output(lambda out, q, k, v, mask: out * 1.01),
    ),
    PastBug(
        "Scores are rounded to half precision.",
        "made",
        ("oracle", "sizes"),
        with_changed_inputs(lambda q, k, v, mask: (q.half().to(q.dtype), k, v, mask)),
    ),
    # widths
    PastBug(
        "The scale is that of the next larger power of two.",
        "made",
        ("sizes",),
        lambda: lambda q, k, v, mask: attend(q, k, v, mask, scale=(1 << (q.shape[3] - 1).bit_length()) ** -0.5),
    ),
    PastBug(
        "Channels beyond a multiple of 32 are not read.",
        "mlc-ai/mlc-llm#1889",
        ("oracle",),
        wrong_if(
            lambda q, k, v, mask: q.shape[3] % 32 > 0,
            with_changed_inputs(lambda q, k, v, mask: (q * (torch.arange(q.shape[3]) < q.shape[3] // 2), k, v, mask)),
        ),
    ),
    PastBug(
        "The output has the width of the query.",
        "NVIDIA/TensorRT-LLM#4281",
        ("oracle", "sizes"),
        with_changed_output(lambda out, q, k, v, mask: F.pad(out, (0, q.shape[3]))[..., : q.shape[3]]),
    ),
    # heads
    PastBug(
        "Fewer than 8 key heads are assigned to query heads in turn, not in groups.",
        "pytorch/pytorch#193893",
        ("oracle", "sizes"),
        with_changed_inputs(interleaved),
    ),
    PastBug(
        "Heads after the 16th read the keys of the first 16.",
        "made",
        ("sizes",),
        wrong_if(
            lambda q, k, v, mask: q.shape[1] > 16,
            with_changed_inputs(lambda q, k, v, mask: (q[:, torch.arange(q.shape[1]) % 16], k, v, mask)),
        ),
    ),
    # gradients
    PastBug(
        "Gradients are 150 times too large at more than 128 tokens.",
        "Dao-AILab/flash-attention#2623",
        ("gradients_at_sizes",),
        with_changed_output(lambda out, q, k, v, mask: gradient_times(out, 150.0) if q.shape[2] > 128 else out),
    ),
    PastBug(
        "Shared keys get the gradient of one head of their group.",
        "marin-community/levanter#449",
        ("gradients_of_inputs", "gradients_at_sizes"),
        lambda: first_of_group,
    ),
    PastBug(
        "Only the last block of keys gets a gradient.",
        "made",
        ("gradients_at_sizes",),
        lambda: last_block_gradient,
    ),
    PastBug(
        "Gradients are wrong for a width of 256 and several batch items.",
        "NVIDIA/TransformerEngine#3216",
        ("gradients_at_sizes",),
        with_changed_output(
            lambda out, q, k, v, mask: gradient_times(out, 5.0) if q.shape[3] == 256 and len(q) > 1 else out
        ),
    ),
    # memory and state
    PastBug(
        "Values are read as if they were contiguous.",
        "ROCm/pytorch#3230",
        ("strides", "sizes"),
        with_changed_inputs(lambda q, k, v, mask: (q, k, as_contiguous(v), mask)),
    ),
    PastBug(
        "Expanded keys are read as if they were contiguous.",
        "pytorch/pytorch#191937",
        ("strides",),
        wrong_if(lambda q, k, v, mask: 0 in k.stride(), with_changed_output(lambda out, q, k, v, mask: out.flip(2))),
    ),
    PastBug("The query is scaled in place.", "made", ("pure",), lambda: scaled_in_place),
    PastBug(
        "Results are cached by the memory addresses of the inputs.",
        "ScalingIntelligence/KernelBench#165",
        ("memory_of_calls",),
        cached,
    ),
    PastBug(
        "Results are cached by their shape.", "ikawrakow/ik_llama.cpp#2096", ("memory_of_calls", "oracle"), last_result
    ),
    PastBug("All results share one buffer.", "made", ("memory_of_calls",), workspace),
    PastBug("Results change from call to call.", "tenstorrent/tt-metal#50512", ("determinism",), every_second_call),
    PastBug(
        "Unused cache slots after the sequence are read with weight 0.",
        "vllm-project/vllm#47305",
        ("layouts",),
        lambda: reads_past_the_end,
    ),
    PastBug(
        "Items of a batch begin one token apart.",
        "flashinfer-ai/flashinfer#3800",
        ("oracle", "batch", "sizes"),
        with_changed_inputs(lambda q, k, v, mask: (_items_a_token_apart(q), k, v, mask)),
    ),
    PastBug(
        "Inputs are made contiguous only when a shape is first seen.",
        "Dao-AILab/flash-attention#2886",
        ("strides", "layouts"),
        copied_once,
    ),
    PastBug(
        "Rows after the last document are not written.",
        "Dao-AILab/flash-attention#1228",
        ("unwritten",),
        lambda: unwritten_rows,
    ),
    PastBug(
        "Gradients of keys that no query sees are not written.",
        "pytorch/FBGEMM#5754",
        ("unwritten",),
        lambda: unwritten_gradients,
    ),
    PastBug(
        "The result is uninitialized memory, which often holds a freed result.",
        "ScalingIntelligence/KernelBench#82",
        ("oracle", "unwritten"),
        lambda: unwritten,
    ),
    PastBug(
        "The upstream gradient is read as if it were contiguous.",
        "Dao-AILab/flash-attention#355",
        ("strides",),
        with_changed_output(lambda out, q, k, v, mask: with_backward(out, as_contiguous)),
    ),
    PastBug(
        "A recorded graph keeps the number of keys of its first call.",
        "paiml/aprender#2030",
        ("oracle", "order_of_calls"),
        first_lengths,
    ),
    PastBug(
        "Results are cached by a fingerprint of the inputs.",
        "flashinfer-ai/flashinfer-bench-starter-kit#21",
        ("twins",),
        cached_by(by_some_entries),
    ),
    PastBug(
        "Results are cached by the identities of the input tensors.",
        "gpu-mode/reference-kernels#102",
        ("memory_of_calls", "repeats"),
        cached_by(lambda q, k, v, mask: (id(q), id(k), id(v), q.shape, v.shape, q.dtype)),
    ),
    PastBug(
        "Only the first ten calls are right.",
        "karpathy/llm.c#851",
        ("oracle", "repeats"),
        switched(lambda q, k, v, mask: attend(q, k, v, mask) + 0.01, lambda call: call >= 10),
    ),
    PastBug(
        "Merging two empty parts of the keys gives NaN.",
        "flashinfer-ai/flashinfer#4018",
        ("oracle", "empty_rows", "sizes"),
        lambda: empty_splits,
    ),
    PastBug(
        "NaN in a masked key reaches the result, as 0 times NaN.",
        "pytorch/pytorch#101967",
        ("isolation",),
        lambda: attend,
    ),
)
"""Kernels that reproduce bugs, most of them published."""
