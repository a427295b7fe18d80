static boolean overlaps(int a, int b, int x, int y) {
    return a < y && x < b;
}

static boolean contains(int lo, int hi, int x) {
    return lo <= x && x < hi;
}

static int gap(int a, int b, int x, int y) {
    if (b < x) {
        return x - b;
    }
    if (y < a) {
        return a - y;
    }
    return 0;
}
