"""Presets: masks with the attention patterns of well-known papers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from saccade.masks.mask import Mask
from saccade.masks.mask_fields import POSITION_BITS, SIZE_BITS
from saccade.masks.rules.block_coarse import Coarse
from saccade.masks.rules.causal import Causal
from saccade.masks.rules.documents import Documents, lengths_per_item
from saccade.masks.rules.global_tokens import Global, global_positions
from saccade.masks.rules.prefix import Prefix
from saccade.masks.rules.prefix_per_document import PrefixPerDocument
from saccade.masks.rules.random_blocks import DRAW_BITS, SEED_BITS, Random
from saccade.masks.rules.strided import Strided
from saccade.masks.rules.window import Window
from saccade.support.argument_hints import argument_hints
from saccade.support.errors import shown, value_error
from saccade.support.validation import check_int

_GLOBAL_BITS = 20  # each global token is stored as a position


@argument_hints()
def sliding_window(window: int) -> Mask:
    """Return a sliding-window mask: causal attention to the last ``window`` keys, including the query's own.

    >>> print(sliding_window(2).picture(4))
    1 . . .
    1 1 . .
    . 1 1 .
    . . 1 1

    Args:
        window: number of visible keys, at least 1, including the query's own key (which ``Window`` does not count).

    Reference: Jiang et al. 2023, arXiv:2310.06825, section 2, whose window counts the same way.
    """
    check_int("window", window)
    return Causal() & Window(window - 1, 0)


@argument_hints()
def longformer(each_side: int, positions: Iterable[int] = (0,)) -> Mask:
    """Return the Longformer mask: a window on both sides, and global tokens that see and are seen by all tokens.

    >>> print(longformer(1, [0]).picture(5))
    1 1 1 1 1
    1 1 1 . .
    1 1 1 1 .
    1 . 1 1 1
    1 . . 1 1

    Args:
        each_side: number of visible keys on each side of a query, not counting its own. The paper's window size w
            (``attention_window`` in its code) is twice this number.
        positions: positions of the global tokens.

    Reference: Beltagy et al. 2020, arXiv:2004.05150, section 3.1.
    """
    check_int("each_side", each_side, 0)
    return Window(each_side, each_side) | Global(global_positions(positions))


@argument_hints()
def bigbird(
    block_size: int, *, window_blocks: int = 3, global_blocks: int = 2, random_blocks: int = 3, seed: int = 0
) -> Mask:
    """Return the BigBird mask: each block of tokens sees neighbouring blocks, the first blocks and random blocks.

    >>> print(bigbird(1, window_blocks=3, global_blocks=1, random_blocks=1).picture(8))
    1 1 1 1 1 1 1 1
    1 1 1 . . . . .
    1 1 1 1 . 1 . .
    1 . 1 1 1 1 . .
    1 1 . 1 1 1 . .
    1 . . 1 1 1 1 .
    1 . . . . 1 1 1
    1 . 1 . . . 1 1

    The mask is the same in training and evaluation, and for any number of keys: the global blocks are the first blocks
    (some implementations use the first and the last), and the random blocks come from `Random`.

    Args:
        block_size: number of tokens in a block.
        window_blocks: number of neighbouring blocks that a block sees, including itself; odd.
        global_blocks: number of blocks at the beginning that see all keys and that all queries see.
        random_blocks: number of random blocks for each block; some may be in the window or beyond the last key.
        seed: seed of the random blocks.

    Reference: Zaheer et al. 2020, arXiv:2007.14062, section 2.
    """
    check_int("block_size", block_size, below=1 << SIZE_BITS)
    check_int("window_blocks", window_blocks)
    check_int("global_blocks", global_blocks, 0, below=1 << SIZE_BITS)
    check_int("random_blocks", random_blocks, 0, below=1 << DRAW_BITS)
    check_int("seed", seed, 0, below=1 << SEED_BITS)
    if window_blocks % 2 == 0:
        raise value_error("window_blocks", "be odd", window_blocks, hint="it counts the block itself")
    if global_blocks * block_size >> _GLOBAL_BITS:
        rule = f"hold fewer than 2**{_GLOBAL_BITS} tokens"
        raise value_error("global_blocks", rule, f"{global_blocks} of {block_size}")
    mask: Mask = Coarse(Window(window_blocks // 2, window_blocks // 2), block_size)
    if global_blocks:
        mask = mask | Global(range(global_blocks * block_size))
    return mask | Random(random_blocks, block_size, seed) if random_blocks else mask


@argument_hints()
def streaming(sink_tokens: int, window: int) -> Mask:
    """Return the StreamingLLM mask: causal attention to the first tokens and to the most recent tokens.

    >>> print(streaming(1, 2).picture(5))
    1 . . . .
    1 1 . . .
    1 1 1 . .
    1 . 1 1 .
    1 . . 1 1

    Args:
        sink_tokens: number of positions at the beginning that every later query sees, at least 0.
        window: number of most recent keys, including the query's own, at least 1.

    Reference: Xiao et al. 2024, arXiv:2309.17453, section 3.2. The paper counts positions within the cache; here
    positions do not change.
    """
    check_int("sink_tokens", sink_tokens, 0, below=1 << POSITION_BITS)
    check_int("window", window)
    near = Window(window - 1, 0)
    return Causal() & (near | Prefix(sink_tokens)) if sink_tokens else Causal() & near


@argument_hints()
def sparse_transformer(step: int) -> Mask:
    """Return the Sparse Transformer mask: causal attention to the last ``step`` keys and every ``step``-th earlier key.

    >>> print(sparse_transformer(3).picture(7))
    1 . . . . . .
    1 1 . . . . .
    1 1 1 . . . .
    1 1 1 1 . . .
    . 1 1 1 1 . .
    . . 1 1 1 1 .
    1 . . 1 1 1 1

    Args:
        step: the stride. If it is close to the square root of the length n, a query sees about 2 * sqrt(n) keys.

    Reference: Child et al. 2019, arXiv:1904.10509, section 4.3 (the strided pattern, as the union of both heads' sets).
    """
    check_int("step", step, below=1 << POSITION_BITS)
    return Causal() & (Window(step, 0) | Strided(step))


@argument_hints()
def prefix_lm(length: int) -> Mask:
    """Return the prefix-LM mask: causal attention, but all tokens see the first ``length`` positions.

    >>> print(prefix_lm(2).picture(4))
    1 1 . .
    1 1 . .
    1 1 1 .
    1 1 1 1

    Args:
        length: number of positions in the prefix, at least 0.

    Reference: Raffel et al. 2020, arXiv:1910.10683, section 3.2.1.
    """
    check_int("length", length, 0, below=1 << POSITION_BITS)
    return Causal() | Prefix(length)


@argument_hints(lengths="shared_prefix([8, 3, 4]): tokens of the prompt, then of each continuation")
def shared_prefix(lengths: Sequence[int] | Sequence[Sequence[int]]) -> Mask:
    """Return the mask for prompts with several continuations each: a continuation sees its prompt and itself.

    The prompt is computed once for all its continuations, as in group-based reinforcement learning or when sampling
    several answers to a question. If the positions of each continuation start after those of the prompt, every output
    is the same as if the prompt had only this continuation.

    >>> print(shared_prefix([2, 2, 2]).picture(6))
    1 . . . . .
    1 1 . . . .
    1 1 1 . . .
    1 1 1 1 . .
    1 1 . . 1 .
    1 1 . . 1 1
    >>> print(shared_prefix([[1, 1, 1], [1, 2]]).picture(6))
    1 . . . . .
    1 1 . . . .
    1 . 1 . . .
    . . . 1 . .
    . . . 1 1 .
    . . . 1 1 1

    Args:
        lengths: number of tokens in a prompt and in each of its continuations; or a list of such lists for several
            packed prompts. All batch items have the same lengths.

    Reference: Juravsky et al. 2024, arXiv:2402.05099, section 3 (Hydragen).
    """
    groups = lengths_per_item(lengths)
    if not all(groups):
        raise value_error("lengths", "contain the length of a prompt in each list", shown(lengths))
    prompts = PrefixPerDocument([sum(group) for group in groups], [group[0] for group in groups])
    return Causal() & (prompts | Documents([length for group in groups for length in group]))
