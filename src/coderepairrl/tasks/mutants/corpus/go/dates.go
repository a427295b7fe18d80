func isLeap(year int) bool {
	if year % 400 == 0 {
		return true
	}
	if year % 100 == 0 {
		return false
	}
	return year % 4 == 0
}

func weekday(start int, days int) int {
	return (start + days) % 7
}

func quarter(month int) int {
	return (month - 1) / 3 + 1
}

func elapsed(start int, end int) int {
	if end >= start {
		return end - start
	}
	return end + 24 - start
}
