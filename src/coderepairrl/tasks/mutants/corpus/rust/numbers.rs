pub fn clamp(x: i64, lo: i64, hi: i64) -> i64 {
    if x < lo {
        return lo;
    }
    if x > hi {
        return hi;
    }
    return x;
}

pub fn gcd(mut a: i64, mut b: i64) -> i64 {
    while b > 0 {
        let rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

pub fn factorial(n: i64) -> i64 {
    let mut result = 1;
    for i in 2..=n {
        result = result * i;
    }
    return result;
}

pub fn power(mut x: i64, mut n: i64) -> i64 {
    let mut result = 1;
    while n > 0 {
        if n % 2 == 1 {
            result = result * x;
        }
        x = x * x;
        n = n / 2;
    }
    return result;
}

pub fn is_prime(n: i64) -> bool {
    if n < 2 {
        return false;
    }
    let mut i = 2;
    while i * i <= n {
        if n % i == 0 {
            return false;
        }
        i += 1;
    }
    return true;
}

pub fn digit_sum(mut n: i64) -> i64 {
    let mut total = 0;
    while n > 0 {
        total += n % 10;
        n = n / 10;
    }
    return total;
}

pub fn sign(x: i64) -> i64 {
    if x > 0 {
        return 1;
    }
    if x < 0 {
        return -1;
    }
    return 0;
}

pub fn count_divisors(n: i64) -> i64 {
    let mut count = 0;
    for i in 1..=n {
        if n % i == 0 {
            count += 1;
        }
    }
    return count;
}
