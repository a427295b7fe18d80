pub fn index_of(xs: &[i64], value: i64) -> i64 {
    for i in 0..xs.len() as i64 {
        if xs[i as usize] == value {
            return i;
        }
    }
    return -1;
}

pub fn last_index(xs: &[i64], value: i64) -> i64 {
    let mut result = -1;
    for i in 0..xs.len() as i64 {
        if xs[i as usize] == value {
            result = i;
        }
    }
    return result;
}
