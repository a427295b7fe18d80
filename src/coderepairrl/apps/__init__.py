"""What is built from the loop and is not training itself: a demonstration, fixing a repository, serving a model."""
