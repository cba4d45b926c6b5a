"""Exact duplicates of documents, found by hash with a bounded memory.

A document's hash is 64 bits of BLAKE2b over its texts: among n different documents about n^2 / 2^65 look equal by
chance, less than one in six billion. Hashes lie on disk, 8 bytes a document; they are compared in as many passes over
that file as the bound of memory needs, each over its own range of hash values.
"""

import hashlib
import itertools
from collections.abc import Iterable

import numpy as np

UNIQUE, DUPLICATE, EMPTY = 0, 1, 2  # what becomes of a document
HASHES_A_PASS = 1 << 23
BLOCK = 1 << 20
MEMORY_MIB = 256  # what `mark_duplicates` takes at most: twice a pass's hashes, and a block's temporaries


def hash_texts(texts: Iterable[str]) -> int:
    """64-bit hash of a document that consists of these texts, in this order."""
    digest = hashlib.blake2b(digest_size=8)
    for text in texts:
        content = text.encode("utf-8", errors="surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
    return int.from_bytes(digest.digest(), "little")


def mark_duplicates(
    hashes: np.ndarray, marks: np.ndarray, *, hashes_a_pass: int = HASHES_A_PASS, block: int = BLOCK
) -> int:
    """Marks every document that repeats an earlier one; returns their number.

    Args:
        hashes: uint64 [n], in the order of documents; may be mapped from a file.
        marks: uint8 [n], overwritten: UNIQUE becomes DUPLICATE where the hash stood earlier. EMPTY documents neither
            count nor make others duplicates.
        hashes_a_pass, block: hashes that are held, and read, at once. Hashes are spread evenly, so that a pass sees its
            share of the different ones, however often some of them repeat.
    """
    passes = max(-(-len(hashes) // hashes_a_pass), 1)
    borders = [(number << 64) // passes for number in range(passes + 1)]
    found = 0
    for low, high in itertools.pairwise(borders):
        seen = np.empty(0, np.uint64)  # sorted
        for start in range(0, len(hashes), block):
            part, state = hashes[start : start + block], marks[start : start + block]
            wanted = np.flatnonzero((part >= np.uint64(low)) & (part <= np.uint64(high - 1)) & (state == UNIQUE))
            values, first = np.unique(part[wanted], return_index=True)
            place = np.searchsorted(seen, values)
            new = np.ones(len(values), bool)
            inside = place < len(seen)
            new[inside] = seen[place[inside]] != values[inside]
            repeated = np.ones(len(wanted), bool)
            repeated[first[new]] = False
            state[wanted[repeated]] = DUPLICATE
            found += int(repeated.sum())
            seen = np.insert(seen, place[new], values[new])
    return found
