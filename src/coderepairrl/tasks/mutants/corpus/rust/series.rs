pub fn fibonacci(n: i64) -> i64 {
    let mut a = 0;
    let mut b = 1;
    for _ in 0..n {
        let c = a + b;
        a = b;
        b = c;
    }
    return a;
}

pub fn triangle(n: i64) -> i64 {
    return n * (n + 1) / 2;
}

pub fn collatz(mut n: i64) -> i64 {
    let mut count = 0;
    while n != 1 {
        if n % 2 == 0 {
            n = n / 2;
        } else {
            n = 3 * n + 1;
        }
        count += 1;
    }
    return count;
}
