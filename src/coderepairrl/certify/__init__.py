"""``crrl check``: what this machine has and lacks, and the exams that every implementation of a seam sits."""
