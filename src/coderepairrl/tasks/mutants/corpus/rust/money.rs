pub fn discount(price: i64, rate: i64) -> i64 {
    return price - price * rate / 100;
}

pub fn savings(mut total: i64, rate: i64, years: i64) -> i64 {
    for _ in 0..years {
        total += total * rate / 100;
    }
    return total;
}

pub fn fee(price: i64, limit: i64) -> i64 {
    if price <= limit {
        return 0;
    }
    return (price - limit) / 10;
}

pub fn cheapest(prices: &[i64], limit: i64) -> i64 {
    let mut best = -1;
    for &price in prices {
        if price >= limit && (best == -1 || price < best) {
            best = price;
        }
    }
    return best;
}
