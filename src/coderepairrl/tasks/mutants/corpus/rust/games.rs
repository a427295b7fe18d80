pub fn level(points: i64, size: i64) -> i64 {
    return points / size + 1;
}

pub fn best_of(xs: &[i64], ys: &[i64]) -> i64 {
    let mut total = 0;
    for i in 0..xs.len() as i64 {
        if xs[i as usize] > ys[i as usize] {
            total += 1;
        } else if xs[i as usize] < ys[i as usize] {
            total -= 1;
        }
    }
    return total;
}

pub fn nim(n: i64, k: i64) -> bool {
    return n % (k + 1) != 0;
}
