func level(points int, size int) int {
	return points / size + 1
}

func bestOf(xs []int, ys []int) int {
	total := 0
	for i := 0; i < len(xs); i++ {
		if xs[i] > ys[i] {
			total++
		} else if xs[i] < ys[i] {
			total--
		}
	}
	return total
}

func nim(n int, k int) bool {
	return n % (k + 1) != 0
}
