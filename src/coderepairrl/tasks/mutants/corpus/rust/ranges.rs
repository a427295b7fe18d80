pub fn overlaps(a: i64, b: i64, x: i64, y: i64) -> bool {
    return a < y && x < b;
}

pub fn contains(lo: i64, hi: i64, x: i64) -> bool {
    return lo <= x && x < hi;
}

pub fn gap(a: i64, b: i64, x: i64, y: i64) -> i64 {
    if b < x {
        return x - b;
    }
    if y < a {
        return a - y;
    }
    return 0;
}
