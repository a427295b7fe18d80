func overlaps(a int, b int, x int, y int) bool {
	return a < y && x < b
}

func contains(lo int, hi int, x int) bool {
	return lo <= x && x < hi
}

func gap(a int, b int, x int, y int) int {
	if b < x {
		return x - b
	}
	if y < a {
		return a - y
	}
	return 0
}
