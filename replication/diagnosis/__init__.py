"""Tools that look at replicas from outside. Nothing on the way of a forward imports them."""
