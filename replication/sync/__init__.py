"""Synchronization of the replicas of one forward: their life cycle, waits and messages."""
