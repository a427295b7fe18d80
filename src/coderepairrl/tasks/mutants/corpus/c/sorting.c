bool is_sorted(const int *xs, int n) {
    for (int i = 1; i < n; i++) {
        if (xs[i] < xs[i - 1]) {
            return false;
        }
    }
    return true;
}

int rank(const int *xs, int n, int value) {
    int count = 1;
    for (int i = 0; i < n; i++) {
        int x = xs[i];
        if (x > value) {
            count++;
        }
    }
    return count;
}
