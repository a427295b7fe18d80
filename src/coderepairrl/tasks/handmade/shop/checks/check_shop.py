from shop.orders import Order
from shop.stock import Stock

stock = Stock({"cup": 4, "plate": 3})
order = Order(stock, {"cup": 2})
assert order.place() and order.state == "placed"
assert stock.available("cup") == 2
assert not Order(stock, {"spoon": 1}).place()

order.cancel()
assert order.state == "cancelled"
assert stock.available("cup") == 4, stock.counts

refused = Order(stock, {"cup": 2, "plate": 5, "spoon": 1})
assert not refused.place() and refused.state == "refused"
assert (stock.available("cup"), stock.available("plate")) == (4, 3), stock.counts

for state in (order, refused):
    try:
        state.cancel()
    except ValueError:
        continue
    raise AssertionError("cancelled twice")
assert stock.available("cup") == 4
