int level(int points, int size) {
    return points / size + 1;
}

int best_of(const int *xs, const int *ys, int n) {
    int total = 0;
    for (int i = 0; i < n; i++) {
        if (xs[i] > ys[i]) {
            total++;
        } else if (xs[i] < ys[i]) {
            total--;
        }
    }
    return total;
}

bool nim(int n, int k) {
    return n % (k + 1) != 0;
}
