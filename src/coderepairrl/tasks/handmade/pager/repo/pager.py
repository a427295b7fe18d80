"""Cut long lists into pages."""


class Pager:
    """Pages of `size` items, numbered from 1."""

    def __init__(self, items, size=10):
        if size < 1:
            raise ValueError("a page holds at least one item")
        self.items = list(items)
        self.size = size

    @property
    def count(self):
        """Number of pages; an empty list has one empty page."""
        return len(self.items) // self.size + 1

    def page(self, number):
        """Items of one page."""
        if not 1 <= number <= self.count:
            raise IndexError(f"no page {number}, there are {self.count}")
        start = (number - 1) * self.size
        return self.items[start : start + self.size]

    def has_next(self, number):
        """Whether a page follows."""
        return number < self.count
