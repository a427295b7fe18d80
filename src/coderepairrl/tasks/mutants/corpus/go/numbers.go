func clamp(x int, lo int, hi int) int {
	if x < lo {
		return lo
	}
	if x > hi {
		return hi
	}
	return x
}

func gcd(a int, b int) int {
	for b > 0 {
		rest := a % b
		a = b
		b = rest
	}
	return a
}

func factorial(n int) int {
	result := 1
	for i := 2; i <= n; i++ {
		result = result * i
	}
	return result
}

func power(x int, n int) int {
	result := 1
	for n > 0 {
		if n % 2 == 1 {
			result = result * x
		}
		x = x * x
		n = n / 2
	}
	return result
}

func isPrime(n int) bool {
	if n < 2 {
		return false
	}
	i := 2
	for i * i <= n {
		if n % i == 0 {
			return false
		}
		i++
	}
	return true
}

func digitSum(n int) int {
	total := 0
	for n > 0 {
		total += n % 10
		n = n / 10
	}
	return total
}

func sign(x int) int {
	if x > 0 {
		return 1
	}
	if x < 0 {
		return -1
	}
	return 0
}

func countDivisors(n int) int {
	count := 0
	for i := 1; i <= n; i++ {
		if n % i == 0 {
			count++
		}
	}
	return count
}
