func fibonacci(n int) int {
	a := 0
	b := 1
	for k := 0; k < n; k++ {
		c := a + b
		a = b
		b = c
	}
	return a
}

func triangle(n int) int {
	return n * (n + 1) / 2
}

func collatz(n int) int {
	count := 0
	for n != 1 {
		if n % 2 == 0 {
			n = n / 2
		} else {
			n = 3 * n + 1
		}
		count++
	}
	return count
}
