pub fn is_sorted(xs: &[i64]) -> bool {
    for i in 1..xs.len() as i64 {
        if xs[i as usize] < xs[(i - 1) as usize] {
            return false;
        }
    }
    return true;
}

pub fn rank(xs: &[i64], value: i64) -> i64 {
    let mut count = 1;
    for &x in xs {
        if x > value {
            count += 1;
        }
    }
    return count;
}
