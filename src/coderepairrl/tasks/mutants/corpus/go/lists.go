func indexOf(xs []int, value int) int {
	for i := 0; i < len(xs); i++ {
		if xs[i] == value {
			return i
		}
	}
	return -1
}

func lastIndex(xs []int, value int) int {
	result := -1
	for i := 0; i < len(xs); i++ {
		if xs[i] == value {
			result = i
		}
	}
	return result
}
