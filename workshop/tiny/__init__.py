"""Scripts that make the shipped tiny policy, and the bar that `crrl hello` has to pass."""
