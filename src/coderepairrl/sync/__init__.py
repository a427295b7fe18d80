"""Weights on their way from the learner to an engine, each version with one checksum."""
