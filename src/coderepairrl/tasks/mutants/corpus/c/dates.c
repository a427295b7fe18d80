bool is_leap(int year) {
    if (year % 400 == 0) {
        return true;
    }
    if (year % 100 == 0) {
        return false;
    }
    return year % 4 == 0;
}

int weekday(int start, int days) {
    return (start + days) % 7;
}

int quarter(int month) {
    return (month - 1) / 3 + 1;
}

int elapsed(int start, int end) {
    if (end >= start) {
        return end - start;
    }
    return end + 24 - start;
}
