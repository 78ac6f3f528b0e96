"""The version of both packages, from the metadata of their distribution."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__all__ = ["DISTRIBUTION", "__version__"]

#: The name under which both packages are installed.
DISTRIBUTION = "synchronized-batchnorm"

try:
    __version__ = version(DISTRIBUTION)
except PackageNotFoundError:  # imported from its sources
    __version__ = "0+not.installed"
