"""Phrases that several messages share."""

from __future__ import annotations

from collections.abc import Iterable

__all__: list[str] = []


def path_or_root(path: str) -> str:
    """Returns the path of a submodule, and ``(root)`` for the empty one."""
    return path or "(root)"


#: Characters of an error's text that a message about it repeats.
_LONGEST = 1_000


def described(error: BaseException) -> str:
    """Returns ``ValueError: its text``, whatever the error's own methods do.

    The text is cut where it is very long.
    """
    name = type(error).__name__
    try:
        text = str(error)
        if len(text) > _LONGEST:
            text = text[:_LONGEST] + "..."
        return f"{name}: {text}" if text else name
    except BaseException:  # a method of the error raised, which must not hide the error
        return name


def listed(numbers: Iterable[int], kind: str = "replica") -> str:
    """``[0, 2]`` -> ``"replicas 0, 2"``."""
    texts = [str(number) for number in numbers]
    return f"{kind}{'s' if len(texts) > 1 else ''} {', '.join(texts)}"
