int clamp(int x, int lo, int hi) {
    if (x < lo) {
        return lo;
    }
    if (x > hi) {
        return hi;
    }
    return x;
}

int gcd(int a, int b) {
    while (b > 0) {
        int rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

int factorial(int n) {
    int result = 1;
    for (int i = 2; i <= n; i++) {
        result = result * i;
    }
    return result;
}

int power(int x, int n) {
    int result = 1;
    while (n > 0) {
        if (n % 2 == 1) {
            result = result * x;
        }
        x = x * x;
        n = n / 2;
    }
    return result;
}

bool is_prime(int n) {
    if (n < 2) {
        return false;
    }
    int i = 2;
    while (i * i <= n) {
        if (n % i == 0) {
            return false;
        }
        i++;
    }
    return true;
}

int digit_sum(int n) {
    int total = 0;
    while (n > 0) {
        total += n % 10;
        n = n / 10;
    }
    return total;
}

int sign(int x) {
    if (x > 0) {
        return 1;
    }
    if (x < 0) {
        return -1;
    }
    return 0;
}

int count_divisors(int n) {
    int count = 0;
    for (int i = 1; i <= n; i++) {
        if (n % i == 0) {
            count++;
        }
    }
    return count;
}
