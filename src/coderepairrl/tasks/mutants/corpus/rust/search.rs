pub fn binary_search(xs: &[i64], value: i64) -> i64 {
    let mut lo = 0;
    let mut hi = xs.len() as i64 - 1;
    while lo <= hi {
        let mid = (lo + hi) / 2;
        if xs[mid as usize] == value {
            return mid;
        }
        if xs[mid as usize] < value {
            lo = mid + 1;
        } else {
            hi = mid - 1;
        }
    }
    return -1;
}

pub fn lower_bound(xs: &[i64], value: i64) -> i64 {
    let mut lo = 0;
    let mut hi = xs.len() as i64;
    while lo < hi {
        let mid = (lo + hi) / 2;
        if xs[mid as usize] < value {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo;
}

pub fn argmax(xs: &[i64]) -> i64 {
    let mut best = 0;
    for i in 1..xs.len() as i64 {
        if xs[i as usize] > xs[best as usize] {
            best = i;
        }
    }
    return best;
}

pub fn peak(xs: &[i64]) -> i64 {
    for i in 1..xs.len() as i64 - 1 {
        if xs[i as usize] > xs[(i - 1) as usize] && xs[i as usize] > xs[(i + 1) as usize] {
            return i;
        }
    }
    return -1;
}
