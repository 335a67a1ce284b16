"""The noise bank: a small set of shared initial noises, so that seeds can be donors to each other.

Under the policy ``bank`` a seed picks one of ``BANK_SIZE`` noises per latent shape. A clip made
from bank noise is as legitimate a sample as any other, and the choice depends on the seed alone.
"""

from __future__ import annotations

import hashlib

BANK_SIZE = 16
POLICIES = ("keep", "bank")


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def bank_index(seed: int, size: int = BANK_SIZE) -> int:
    """Which of the bank's noises (0..size-1) a seed picks; the same on every machine."""
    return _hash(f"carnator seed {seed}") % size


def bank_seed(index: int) -> int:
    """The generator seed (0..2^63-1) of the bank's noise number ``index``."""
    return _hash(f"carnator bank {index}") % 2**63
