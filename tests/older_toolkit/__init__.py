"""A batch norm with its own pipes, like those of programs. Nothing of the toolkit is used."""

from tests.older_toolkit.batchnorm import BatchNorm2dCorrected, BatchNorm2dOlder

__all__ = ["BatchNorm2dCorrected", "BatchNorm2dOlder"]
