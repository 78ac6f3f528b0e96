"""Published losses on two ranks, beside one device: see `docs/audit.md`."""
