"""PrefixStore: keys and values of texts that begin alike, kept in a folder and shared by prompts and processes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.caches.cache import LayerCache
from saccade.caches.files.block_store import BlockFolder
from saccade.caches.files.tensor_files import VERSION, checked_path, decoded, encoded
from saccade.caches.kv_cache import KVCache
from saccade.caches.model_cache import Cache
from saccade.support.errors import type_error, unsupported, value_error
from saccade.support.validation import check_int, check_type

__all__ = ["PrefixStore"]

_KIND = "block of a prefix"


class PrefixStore:
    """A folder of keys and values, block by block, for prompts that begin like earlier ones.

    A text is cut into blocks of ``block_size`` tokens. Each block has a file, named by a hash of its tokens, of all
    blocks before it and of everything else that keys and values depend on: the model's `fingerprint`, the ``salt``
    and the format. So a block is found only where the whole text up to its end is the same, and never for another
    model. What is read is checked byte by byte, and the tokens are compared; a damaged file counts as missing and is
    removed. One that may not be read counts as missing.

    Any number of processes may use a folder, and any of them may be killed at any time: files appear whole. When
    ``max_bytes`` would be exceeded, the blocks that were not used for longest go, ends of texts before beginnings.

    Only files that the store could have written are read, counted and removed. A link is never followed, whatever it
    stands in place of: what lies outside of the folder stays as it is.

    Args:
        folder: made if there is none. Nothing but the store should write there.
        max_bytes: most bytes that the files may take.
        fingerprint: of the model, from `fingerprint`.
        block_size: tokens in a block.
        salt: whatever else changes keys and values and is no part of the model: autocast, an adapter that a flag
            switches, an image before the text; or a user who must not share with others.

    Raises:
        TypeError, ValueError: arguments that do not fit; a folder that may not be written to, or in which something
            stands that is none of the store's.

    Cost: a file of ``layers * kv_heads * block_size * (head_dim + value_dim)`` elements for each block, read once.

    Example:
        >>> import tempfile
        >>> from saccade import caches, models
        >>> config = models.DecoderConfig(
        ...     vocab_size=9, max_len=64, embed_dim=8, num_heads=2, num_layers=1, feed_forward_dim=8
        ... )
        >>> model = models.Decoder(config).eval()
        >>> store = PrefixStore(tempfile.mkdtemp(), 1 << 20, fingerprint=caches.fingerprint(model), block_size=4)
        >>> text, cache = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2], model.new_cache()
        >>> first = models.generate(model, [text], 3, cache=cache)
        >>> store.put(text, cache)
        2
        >>> again = model.new_cache()
        >>> known = store.restore(text, again)
        >>> known, models.generate(model, [text[known:]], 3, cache=again) == first
        (8, True)

    Reference: the chain of hashes is that of vLLM's automatic prefix caching; Kwon et al. 2023, arXiv:2309.06180.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        max_bytes: int,
        *,
        fingerprint: str,
        block_size: int = 64,
        salt: str = "",
    ):
        hint = "caches.fingerprint(model)"
        self.folder, self.max_bytes = checked_path("folder", folder), check_int("max_bytes", max_bytes)
        self.block_size = check_int("block_size", block_size)
        self.fingerprint = check_type("fingerprint", fingerprint, str, "be a string", hint=hint)
        self.salt = check_type("salt", salt, str, "be a string")
        if not fingerprint:
            raise value_error("fingerprint", "name a model", "''", hint=hint)
        self._blocks = BlockFolder(self.folder, max_bytes)
        self._root = _hash([VERSION, fingerprint, salt, block_size])

    @property
    def nbytes(self) -> int:
        """Bytes that the files take, those of other models and salts in the folder included."""
        return self._blocks.nbytes

    def find(self, tokens: Sequence[int]) -> int:
        """How many tokens at the beginning of a text are there: files are looked for, not read."""
        chain = self._chain(tokens)
        return self.block_size * next((i for i, key in enumerate(chain) if not self._blocks.has(key)), len(chain))

    def restore(self, tokens: Sequence[int], cache: Cache | LayerCache, *, device: torch.device | str = "cpu") -> int:
        """Fill an empty cache with the beginning of a text, as far as it is known.

        Args:
            tokens: of one text.
            cache: an empty cache of a `KVCache` or `saccade.caches.BlockSelectCache` for each layer, batch of one.
            device: where the model is.

        Returns:
            How many tokens the cache now holds, at most all but the last: that one is to be read, since what comes
            after it is asked. Read on with the others, ``tokens[returned:]``.

        Raises:
            ValueError, UnsupportedError: the cache is not empty, or of a kind that cannot be filled.
        """
        size = self.block_size
        layers = _layers(cache)
        if any(layer.length for layer in layers):
            raise value_error("cache", "be empty", f"one of {layers[0].length} columns", hint="crop(0)")
        chain = self._chain(tokens)
        parts: list[list[Tensor]] = []
        for i, key in enumerate(chain[: max(0, len(tokens) - 1) // size]):
            part = self._block(key, list(tokens[i * size : (i + 1) * size]), len(layers))
            if part is None or (parts and any(map(_differ, part, parts[0]))):
                break
            parts.append(part)
        self._blocks.touch(chain[: len(parts)])
        for i, layer in enumerate(layers if parts else ()):
            layer.fill(*(torch.cat([part[2 * i + which] for part in parts], 2).to(device) for which in (0, 1)))
        return len(parts) * size

    def put(self, tokens: Sequence[int], cache: Cache | LayerCache) -> int:
        """Keep the full blocks of a text that a cache has read.

        Args:
            tokens: of the text; the cache holds them first, and may hold more.
            cache: a `KVCache` or `saccade.caches.BlockSelectCache` for each layer, batch of one, whose tokens stand at
                0, 1, 2, …

        Returns:
            Blocks that were written: those that were not there, as far as what the cache holds is exact. Keys made
            after a step that left blocks out are not kept, nor what would not fit in ``max_bytes``.

        Raises:
            ValueError, UnsupportedError: a cache of another kind, or of other tokens.
        """
        layers = _layers(cache)
        chain, held = self._chain(tokens), layers[0].length
        if held < len(tokens):
            raise value_error("tokens", f"be held by the cache, at most {held}", len(tokens))
        states = [_one_text(layer) for layer in layers]
        written, known = 0, 0
        for i, key in enumerate(chain[: min(layer.exact_len for layer in layers) // self.block_size]):
            span = slice(i * self.block_size, (i + 1) * self.block_size)
            if not self._blocks.has(key):
                tensors = {
                    f"{number}.{name}": x[:, :, span]
                    for number, state in enumerate(states)
                    for name, x in state.items()
                }
                about = {"kind": _KIND, "key": key, "tokens": list(tokens[span])}
                if not self._blocks.write(key, encoded(tensors, about), set(chain[: i + 1])):
                    break
                written += 1
            known = i + 1
        self._blocks.touch(chain[:known])
        return written

    def clear(self) -> None:
        """Remove all blocks of the folder, whatever model they are of.

        Raises:
            ValueError: some may not be removed; the others are.
        """
        self._blocks.clear()

    def __repr__(self) -> str:
        return f"PrefixStore({str(self.folder)!r}, {self.max_bytes}, block_size={self.block_size})"

    def _chain(self, tokens: Sequence[int]) -> list[str]:
        """The keys of the full blocks of a text."""
        given = tokens.tolist() if isinstance(tokens, Tensor) else tokens
        is_list = isinstance(given, Sequence) and not isinstance(given, str | bytes)
        if not is_list or not all(type(token) is int for token in given):
            raise type_error("tokens", "be the tokens of one text, a list of ints", type(tokens).__name__)
        key, chain = self._root, []
        for start in range(0, len(given) - self.block_size + 1, self.block_size):
            key = _hash([key, list(given[start : start + self.block_size])])
            chain.append(key)
        return chain

    def _block(self, key: str, tokens: list[int], layers: int) -> list[Tensor] | None:
        """Keys and values of each layer; None if there are none, or none that can be trusted."""
        raw = self._blocks.read(key)
        if raw is None:
            return None
        names = [f"{i}.{which}" for i in range(layers) for which in ("key", "value")]
        try:
            tensors, about = decoded(raw, _KIND)
        except ValueError:
            tensors, about = {}, {}
        is_it = about.get("key") == key and about.get("tokens") == tokens and set(tensors) == set(names)
        found = [tensors[name] for name in names] if is_it else []
        if found and all(self._fits(*pair) for pair in zip(found[::2], found[1::2], strict=True)):
            return found
        self._blocks.remove(key)
        return None

    def _fits(self, key: Tensor, value: Tensor) -> bool:
        """Whether these can be keys and values of a block."""
        is_alike = key.dim() == value.dim() == 4 and key.shape[:3] == value.shape[:3] and key.dtype == value.dtype
        return is_alike and key.is_floating_point() and (len(key), key.shape[2]) == (1, self.block_size)


def _hash(parts: list[object]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _differ(one: Tensor, other: Tensor) -> bool:
    """Whether blocks cannot be those of one text: their widths or types are others."""
    return one.shape != other.shape or one.dtype != other.dtype


def _one_text(layer: KVCache) -> dict[str, Tensor]:
    """Keys and values of a layer; raises unless they are those of one text from 0 on."""
    key, value = layer.key, layer.value
    if not isinstance(layer.kv_positions, range) or layer.kv_positions != range(layer.length):
        raise value_error("cache", "hold tokens at 0, 1, 2, …", "others", hint="one text, unpadded")
    if key is None or value is None or len(key) != 1:
        got, hint = 0 if key is None else len(key), "reorder([b]) of a fork keeps item b"
        raise value_error("cache", "hold a batch of one", got, hint=hint)
    return {"key": key, "value": value}


def _layers(cache: Cache | LayerCache) -> list[KVCache]:
    """The caches of all layers; raises unless each holds all keys."""
    check_type("cache", cache, (Cache, LayerCache), "be a cache")
    found: list[KVCache] = []
    for layer in cache.flat if isinstance(cache, Cache) else (cache,):
        if not isinstance(layer, KVCache):
            reason = f"a {type(layer).__name__} does not hold the keys of all tokens"
            raise unsupported("PrefixStore", [reason], hint="KVCache and BlockSelectCache do")
        found.append(layer)
    return found
