pub fn boxes(n: i64, size: i64) -> i64 {
    return (n + size - 1) / size;
}

pub fn reorder(count: i64, limit: i64, size: i64) -> i64 {
    if count > limit {
        return 0;
    }
    return size - count;
}

pub fn total_price(prices: &[i64], counts: &[i64]) -> i64 {
    let mut total = 0;
    for i in 0..prices.len() as i64 {
        total += prices[i as usize] * counts[i as usize];
    }
    return total;
}

pub fn heaviest(xs: &[i64], limit: i64) -> i64 {
    let mut best = 0;
    for &x in xs {
        if x <= limit && x > best {
            best = x;
        }
    }
    return best;
}
