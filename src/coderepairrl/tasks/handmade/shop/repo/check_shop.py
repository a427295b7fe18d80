from shop.orders import Order
from shop.stock import Stock

stock = Stock({"cup": 4, "plate": 3})
order = Order(stock, {"cup": 2})
assert order.place() and order.state == "placed"
assert stock.available("cup") == 2
assert not Order(stock, {"spoon": 1}).place()
