"""The copies of a layer and the collectives between them, in threads or processes."""
