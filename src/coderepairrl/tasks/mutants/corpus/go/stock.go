func boxes(n int, size int) int {
	return (n + size - 1) / size
}

func reorder(count int, limit int, size int) int {
	if count > limit {
		return 0
	}
	return size - count
}

func totalPrice(prices []int, counts []int) int {
	total := 0
	for i := 0; i < len(prices); i++ {
		total += prices[i] * counts[i]
	}
	return total
}

func heaviest(xs []int, limit int) int {
	best := 0
	for _, x := range xs {
		if x <= limit && x > best {
			best = x
		}
	}
	return best
}
