"""A batch norm with pipes of its own, as a program may ship it; nothing of the toolkit is used."""

from tests.older_toolkit.batchnorm import BatchNorm2dCorrected, BatchNorm2dOlder

__all__ = ["BatchNorm2dCorrected", "BatchNorm2dOlder"]
