"""``crrl check``: the machine's prerequisites, and the exams of implementations of seams."""
