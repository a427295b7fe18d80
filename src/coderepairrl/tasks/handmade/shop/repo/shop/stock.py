"""What is on the shelves."""


class OutOfStock(Exception):
    pass


class Stock:
    def __init__(self, counts):
        self.counts = dict(counts)

    def available(self, item):
        return self.counts.get(item, 0)

    def take(self, item, count):
        """Remove `count` pieces from the shelf."""
        if count > self.available(item):
            raise OutOfStock(f"{item}: {count} wanted, {self.available(item)} there")
        self.counts[item] = self.available(item) - count
