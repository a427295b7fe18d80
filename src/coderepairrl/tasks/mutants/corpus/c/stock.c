int boxes(int n, int size) {
    return (n + size - 1) / size;
}

int reorder(int count, int limit, int size) {
    if (count > limit) {
        return 0;
    }
    return size - count;
}

int total_price(const int *prices, const int *counts, int n) {
    int total = 0;
    for (int i = 0; i < n; i++) {
        total += prices[i] * counts[i];
    }
    return total;
}

int heaviest(const int *xs, int n, int limit) {
    int best = 0;
    for (int i = 0; i < n; i++) {
        int x = xs[i];
        if (x <= limit && x > best) {
            best = x;
        }
    }
    return best;
}
