"""Generators of the documentation: reference pages, diagrams and the picture of an episode."""
