"""Orders of several items at once."""

from shop.stock import OutOfStock


class Order:
    def __init__(self, stock, lines):
        self.stock = stock
        self.lines = dict(lines)
        self.state = "new"

    def place(self):
        """Take everything from the shelves. True if that worked, else the order is refused."""
        try:
            for item, count in self.lines.items():
                self.stock.take(item, count)
        except OutOfStock:
            self.state = "refused"
            return False
        self.state = "placed"
        return True

    def cancel(self):
        """Take back a placed order."""
        if self.state != "placed":
            raise ValueError(f"the order is {self.state}")
        self.state = "cancelled"
