"""torch's CUDA build on a simulated CUDA runtime, for machines without a GPU: see README.md."""
