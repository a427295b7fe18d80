"""Transfer of weights from the learner to an engine, each version with a checksum."""
