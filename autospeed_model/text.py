"""Numbers as people read them."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """So many of it: ``1 image``, ``2 images``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
