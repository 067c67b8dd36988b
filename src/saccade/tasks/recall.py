"""Recall tasks: sequences whose later tokens can be predicted from earlier ones."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.support.errors import value_error
from saccade.support.validation import check_int

IGNORED = -100
"""The target at positions without a question; torch's cross-entropy ignores it by default."""


@dataclasses.dataclass(frozen=True, eq=False)
class Recall:
    """Sequences of a recall task, with questions about earlier tokens.

    Args:
        tokens: int64 ``[examples, length]``.
        targets: int64 ``[examples, length]``: the token to predict at each position, or `IGNORED`.
        context_len: number of leading tokens that a model may read at once. It reads the other tokens, which contain
            the questions, one at a time, so that it does not know a question in advance.
    """

    tokens: Tensor
    targets: Tensor
    context_len: int

    def without_answers(self) -> Recall:
        """Return the recall task with each answer token replaced by 0, for models that are not causal.

        This is not possible if an answer is also a question, as in `passkey` and `induction`.

        Raises:
            ValueError: an answer is also a question.
        """
        asked = self.targets != IGNORED
        answers = F.pad(asked[:, :-1], (1, 0))
        if bool((answers & asked & (self.tokens == F.pad(self.targets, (1, -1)))).any()):
            raise value_error("targets", "not contain an answer that is also a question", "one that is")
        return dataclasses.replace(self, tokens=self.tokens.masked_fill(answers & ~asked, 0))

    def accuracy(self, logits: Tensor) -> float:
        """Return the accuracy on a recall task: the share of targets to which the logits give the highest probability.

        Args:
            logits: ``[examples, length, vocab]``, or ``[examples, n, vocab]`` for the last n tokens.
        """
        targets = self.targets[:, self.targets.shape[1] - logits.shape[1] :]
        asked = targets != IGNORED
        if logits.dim() != 3 or len(logits) != len(targets) or not bool(asked.any()):
            rule = "be [examples, length, vocab], with a target among the tokens"
            raise value_error("logits", rule, list(logits.shape))
        return float((logits.argmax(-1) == targets)[asked].double().mean())


def task_generator(seed: int, **sizes: int) -> torch.Generator:
    """Check that all sizes of a task are ints of at least 1; return a random generator with the task's seed."""
    for name, size in sizes.items():
        check_int(name, size)
    return torch.Generator().manual_seed(check_int("seed", seed, 0))


def passkey(examples: int, length: int, *, key_len: int, vocab_size: int, seed: int) -> Recall:
    """Generate passkey sequences: a marker and a key, hidden in repeated filler; a second marker asks for the key.

    Token 0 is the marker, tokens 1 to 8 are filler, and a key consists of distinct tokens other than these. The marker
    at the end is the question; the model must predict the key token by token.

    Args:
        examples: number of sequences.
        length: number of tokens in a sequence.
        key_len: number of tokens in a key.
        vocab_size: number of tokens in the vocabulary, at least ``9 + key_len``.
        seed: seed of the random generator.

    Raises:
        ValueError: the sizes are inconsistent.

    Example:
        >>> task = passkey(1, 14, key_len=2, vocab_size=20, seed=3)
        >>> task.tokens[0, -3:].tolist() == [0, *task.targets[0, -3:-1].tolist()]
        True

    Reference: Mohtashami and Jaggi 2023, arXiv:2305.16300, section 4.2, with token ids instead of words.
    """
    random = task_generator(seed, examples=examples, length=length, key_len=key_len, vocab_size=vocab_size)
    context = length - key_len - 1
    if context < key_len + 1:
        raise value_error("length", f"be large enough for a key of {key_len} tokens and its marker, twice", length)
    if vocab_size < 9 + key_len:
        raise value_error("vocab_size", f"be at least {9 + key_len}", vocab_size)
    filler = 1 + torch.arange(context) % 8
    tokens = torch.zeros(examples, length, dtype=torch.int64)
    targets = torch.full_like(tokens, IGNORED)
    for row in range(examples):
        key = 9 + torch.randperm(vocab_size - 9, generator=random)[:key_len]
        depth = int(torch.randint(context - key_len, (), generator=random))
        tokens[row, :context] = filler
        tokens[row, depth] = 0
        tokens[row, depth + 1 : depth + 1 + key_len] = key
        tokens[row, context + 1 :] = key
        targets[row, context:-1] = key
    return Recall(tokens, targets, context)


def mqar(examples: int, length: int, num_pairs: int, *, vocab_size: int, seed: int) -> Recall:
    """Generate sequences for multi-query associative recall: key-value pairs, then the keys as questions.

    The pairs come first. The questions follow at random positions, each with its answer as the next token. Token 0
    fills the remaining positions. Keys are sampled without repetition from the lower half of the other tokens, values
    from the upper half.

    Args:
        examples: number of sequences.
        length: number of tokens in a sequence, at least ``4 * num_pairs``.
        num_pairs: number of pairs in a sequence.
        vocab_size: number of tokens in the vocabulary.
        seed: seed of the random generator.

    Raises:
        ValueError: the sizes are inconsistent.

    Example:
        >>> task = mqar(1, 12, 2, vocab_size=9, seed=1)
        >>> task.tokens.shape, task.context_len, int((task.targets >= 0).sum())
        (torch.Size([1, 12]), 4, 2)

    Reference: Arora et al. 2023, arXiv:2312.04927, section 3.2; here with uniformly distributed gaps.
    """
    random = task_generator(seed, examples=examples, length=length, num_pairs=num_pairs, vocab_size=vocab_size)
    if length < 4 * num_pairs:
        raise value_error("length", f"be at least {4 * num_pairs}, for {num_pairs} pairs and as many questions", length)
    keys = (vocab_size - 1) // 2
    if keys < num_pairs:
        raise value_error("vocab_size", f"have {num_pairs} keys, at least {2 * num_pairs + 1}", vocab_size)
    tokens = torch.zeros(examples, length, dtype=torch.int64)
    targets = torch.full_like(tokens, IGNORED)
    slots = (length - 2 * num_pairs) // 2
    for row in range(examples):
        drawn_keys = 1 + torch.randperm(keys, generator=random)[:num_pairs]
        values = 1 + keys + torch.randint(vocab_size - 1 - keys, (num_pairs,), generator=random)
        tokens[row, : 2 * num_pairs] = torch.stack([drawn_keys, values], 1).flatten()
        order = torch.randperm(num_pairs, generator=random)
        question = 2 * num_pairs + 2 * torch.randperm(slots, generator=random)[:num_pairs]
        tokens[row, question], tokens[row, question + 1] = drawn_keys[order], values[order]
        targets[row, question] = values[order]
    return Recall(tokens, targets, 2 * num_pairs)


def induction(examples: int, length: int, *, copied: int, vocab_size: int, seed: int) -> Recall:
    """Generate induction sequences: random tokens, then a copied segment that is predictable from its second token on.

    No token occurs twice before the copied segment, so that the answer is unique.

    Args:
        examples: number of sequences.
        length: number of tokens in a sequence.
        copied: length of the copied segment, at least 2; the original segment starts at a random position.
        vocab_size: number of tokens in the vocabulary; token 0 is not used.
        seed: seed of the random generator.

    Raises:
        ValueError: the sizes are inconsistent.

    Example:
        >>> task = induction(1, 9, copied=3, vocab_size=20, seed=0)
        >>> task.tokens.tolist(), task.targets[0, 6:].tolist()
        ([[16, 11, 15, 4, 18, 3, 15, 4, 18]], [4, 18, -100])

    Reference: Olsson et al. 2022, arXiv:2209.11895.
    """
    random = task_generator(seed, examples=examples, length=length, copied=copied, vocab_size=vocab_size)
    if copied < 2 or length < 2 * copied:
        raise value_error("copied", f"be from 2 to half of length {length}", copied)
    first = length - copied
    if vocab_size - 1 < first:
        raise value_error("vocab_size", f"have {first} tokens besides 0", vocab_size)
    tokens = torch.stack([1 + torch.randperm(vocab_size - 1, generator=random)[:first] for _ in range(examples)])
    start = torch.randint(first - copied + 1, (examples, 1), generator=random)
    repeated = tokens.gather(1, start + torch.arange(copied))
    tokens = torch.cat([tokens, repeated], 1)
    targets = torch.full_like(tokens, IGNORED)
    targets[:, first:-1] = repeated[:, 1:]
    return Recall(tokens, targets, first)


def selective_copying(examples: int, length: int, *, copied: int, vocab_size: int, seed: int) -> Recall:
    """Generate selective-copying sequences: tokens at random positions among blanks, then one marker for each token.

    At each marker, the model must predict the next token to copy. Token 0 is the blank, token 1 is the marker, and the
    other tokens are copied.

    Args:
        examples: number of sequences.
        length: number of tokens in a sequence, including markers.
        copied: number of tokens to copy, at most half of ``length``.
        vocab_size: number of tokens in the vocabulary, at least 3.
        seed: seed of the random generator.

    Raises:
        ValueError: the sizes are inconsistent.

    Example:
        >>> task = selective_copying(1, 9, copied=3, vocab_size=10, seed=0)
        >>> task.tokens.tolist(), task.targets[0, 6:].tolist()
        ([[0, 0, 5, 9, 3, 0, 1, 1, 1]], [5, 9, 3])

    Reference: Gu and Dao 2023, arXiv:2312.00752, section 3.1.
    """
    random = task_generator(seed, examples=examples, length=length, copied=copied, vocab_size=vocab_size)
    context = length - copied
    if copied > context:
        raise value_error("copied", f"be at most half of length {length}", copied)
    if vocab_size < 3:
        raise value_error("vocab_size", "contain a blank, a marker and a token to copy", vocab_size)
    positions = torch.rand(examples, context, generator=random).argsort(1)[:, :copied].sort(1).values
    answers = torch.randint(2, vocab_size, (examples, copied), generator=random)
    tokens = torch.zeros(examples, length, dtype=torch.int64).scatter_(1, positions, answers)
    tokens[:, context:] = 1
    targets = torch.full_like(tokens, IGNORED)
    targets[:, context:] = answers
    return Recall(tokens, targets, context)
