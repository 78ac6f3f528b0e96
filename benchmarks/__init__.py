"""What the layers and the replicas cost, as ratios side by side; see README.md beside this."""
