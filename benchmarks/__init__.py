"""What the layers and the replicas cost, and what others give: see README.md beside this."""
