"""Programs around the training loop: a demonstration, fixing a repository, serving a model."""
