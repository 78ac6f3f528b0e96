"""The version of both packages, from the metadata of their distribution."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]

try:
    __version__ = version("synchronized-batchnorm")
except PackageNotFoundError:  # imported from its sources
    __version__ = "0+not.installed"
