"""What makes the documentation: its generated pages and its picture of an episode."""
