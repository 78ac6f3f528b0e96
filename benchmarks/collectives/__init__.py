"""Collectives of several packages beside one device: see `docs/collectives-compared.md`."""
