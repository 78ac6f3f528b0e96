"""The four steps of a forward on several replicas, and the broadcast of parameters."""
