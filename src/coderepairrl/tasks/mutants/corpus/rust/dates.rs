pub fn is_leap(year: i64) -> bool {
    if year % 400 == 0 {
        return true;
    }
    if year % 100 == 0 {
        return false;
    }
    return year % 4 == 0;
}

pub fn weekday(start: i64, days: i64) -> i64 {
    return (start + days) % 7;
}

pub fn quarter(month: i64) -> i64 {
    return (month - 1) / 3 + 1;
}

pub fn elapsed(start: i64, end: i64) -> i64 {
    if end >= start {
        return end - start;
    }
    return end + 24 - start;
}
