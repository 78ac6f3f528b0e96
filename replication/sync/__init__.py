"""How the replicas of one forward meet: who runs, who waits, and what passes between them."""
