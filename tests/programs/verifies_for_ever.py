"""Verifies ranks that hang. The test interrupts or kills this program."""

from __future__ import annotations

from replication import verify_ranks
from tests.programs import checks

if __name__ == "__main__":
    verify_ranks(checks.hangs)
