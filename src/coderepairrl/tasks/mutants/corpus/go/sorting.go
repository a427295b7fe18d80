func isSorted(xs []int) bool {
	for i := 1; i < len(xs); i++ {
		if xs[i] < xs[i - 1] {
			return false
		}
	}
	return true
}

func rank(xs []int, value int) int {
	count := 1
	for _, x := range xs {
		if x > value {
			count++
		}
	}
	return count
}
