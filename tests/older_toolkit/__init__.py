"""A batch norm with its own pipes, like those that programs ship. It uses nothing of the toolkit."""

from tests.older_toolkit.batchnorm import BatchNorm2dCorrected, BatchNorm2dOlder

__all__ = ["BatchNorm2dCorrected", "BatchNorm2dOlder"]
