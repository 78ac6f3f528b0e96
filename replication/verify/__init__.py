"""Verifies that replicas and ranks give the numbers of one device.

Nothing else in `replication` imports this package.
"""

from replication.verify.comparison import verify
from replication.verify.ranks import verify_ranks
from replication.verify.results import Difference, Verification

__all__ = ["Difference", "Verification", "verify", "verify_ranks"]
