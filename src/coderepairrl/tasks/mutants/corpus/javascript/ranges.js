function overlaps(a, b, x, y) {
    return a < y && x < b;
}

function contains(lo, hi, x) {
    return lo <= x && x < hi;
}

function gap(a, b, x, y) {
    if (b < x) {
        return x - b;
    }
    if (y < a) {
        return a - y;
    }
    return 0;
}
