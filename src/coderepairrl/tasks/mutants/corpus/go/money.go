func discount(price int, rate int) int {
	return price - price * rate / 100
}

func savings(total int, rate int, years int) int {
	for k := 0; k < years; k++ {
		total += total * rate / 100
	}
	return total
}

func fee(price int, limit int) int {
	if price <= limit {
		return 0
	}
	return (price - limit) / 10
}

func cheapest(prices []int, limit int) int {
	best := -1
	for _, price := range prices {
		if price >= limit && (best == -1 || price < best) {
			best = price
		}
	}
	return best
}
