int binary_search(const int *xs, int n, int value) {
    int lo = 0;
    int hi = n - 1;
    while (lo <= hi) {
        int mid = (lo + hi) / 2;
        if (xs[mid] == value) {
            return mid;
        }
        if (xs[mid] < value) {
            lo = mid + 1;
        } else {
            hi = mid - 1;
        }
    }
    return -1;
}

int lower_bound(const int *xs, int n, int value) {
    int lo = 0;
    int hi = n;
    while (lo < hi) {
        int mid = (lo + hi) / 2;
        if (xs[mid] < value) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo;
}

int argmax(const int *xs, int n) {
    int best = 0;
    for (int i = 1; i < n; i++) {
        if (xs[i] > xs[best]) {
            best = i;
        }
    }
    return best;
}

int peak(const int *xs, int n) {
    for (int i = 1; i < n - 1; i++) {
        if (xs[i] > xs[i - 1] && xs[i] > xs[i + 1]) {
            return i;
        }
    }
    return -1;
}
