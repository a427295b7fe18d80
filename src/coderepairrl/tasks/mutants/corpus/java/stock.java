static int boxes(int n, int size) {
    return (n + size - 1) / size;
}

static int reorder(int count, int limit, int size) {
    if (count > limit) {
        return 0;
    }
    return size - count;
}

static int totalPrice(int[] prices, int[] counts) {
    int total = 0;
    for (int i = 0; i < prices.length; i++) {
        total += prices[i] * counts[i];
    }
    return total;
}

static int heaviest(int[] xs, int limit) {
    int best = 0;
    for (int x : xs) {
        if (x <= limit && x > best) {
            best = x;
        }
    }
    return best;
}
