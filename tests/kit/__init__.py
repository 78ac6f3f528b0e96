"""What several test files share, by what it is for. `tests/README.md` explains it."""
