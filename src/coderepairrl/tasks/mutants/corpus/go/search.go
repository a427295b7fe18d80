func binarySearch(xs []int, value int) int {
	lo := 0
	hi := len(xs) - 1
	for lo <= hi {
		mid := (lo + hi) / 2
		if xs[mid] == value {
			return mid
		}
		if xs[mid] < value {
			lo = mid + 1
		} else {
			hi = mid - 1
		}
	}
	return -1
}

func lowerBound(xs []int, value int) int {
	lo := 0
	hi := len(xs)
	for lo < hi {
		mid := (lo + hi) / 2
		if xs[mid] < value {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo
}

func argmax(xs []int) int {
	best := 0
	for i := 1; i < len(xs); i++ {
		if xs[i] > xs[best] {
			best = i
		}
	}
	return best
}

func peak(xs []int) int {
	for i := 1; i < len(xs) - 1; i++ {
		if xs[i] > xs[i - 1] && xs[i] > xs[i + 1] {
			return i
		}
	}
	return -1
}
