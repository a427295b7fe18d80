"""How the shipped tiny policy is made, and the bar that `make hello` has to pass."""
