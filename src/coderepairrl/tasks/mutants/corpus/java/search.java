static int binarySearch(int[] xs, int value) {
    int lo = 0;
    int hi = xs.length - 1;
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

static int lowerBound(int[] xs, int value) {
    int lo = 0;
    int hi = xs.length;
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

static int argmax(int[] xs) {
    int best = 0;
    for (int i = 1; i < xs.length; i++) {
        if (xs[i] > xs[best]) {
            best = i;
        }
    }
    return best;
}

static int peak(int[] xs) {
    for (int i = 1; i < xs.length - 1; i++) {
        if (xs[i] > xs[i - 1] && xs[i] > xs[i + 1]) {
            return i;
        }
    }
    return -1;
}
