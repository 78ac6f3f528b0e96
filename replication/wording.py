"""How messages speak of errors and of replicas."""

from __future__ import annotations

from collections.abc import Iterable

__all__: list[str] = []


def path_or_root(path: str) -> str:
    """The path of a submodule; the root has none."""
    return path or "(root)"


def described(error: BaseException) -> str:
    """``ValueError: its text``, whatever an error's own methods do."""
    try:
        text = str(error)
    except Exception:  # code of a user, on the way to waking those who wait
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def listed(numbers: Iterable[int], kind: str = "replica") -> str:
    """``[0, 2]`` -> ``"replicas 0, 2"``."""
    texts = [str(number) for number in numbers]
    return f"{kind}{'s' if len(texts) > 1 else ''} {', '.join(texts)}"
