"""Runs the command `python -m replication.verify`, which has a module of its own.

New processes import that module by its name, and not a second time as their main module.
"""

from __future__ import annotations

from replication.verify.command import main
from replication.verify.supervision import end

if __name__ == "__main__":
    end(main())
