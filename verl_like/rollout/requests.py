"""Seeds of requests."""

from __future__ import annotations

import hashlib


def request_seed(seed: int, *draw: int | str) -> int:
    """Seed of one response, 0 <= seed < 2**62: the same in every process, after a resume and in every batch.

    draw: what it is the seed of, for instance ("train", number of the prompt's draw, sample, turn).
    """
    digest = hashlib.blake2b("/".join(map(str, (seed, *draw))).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2
