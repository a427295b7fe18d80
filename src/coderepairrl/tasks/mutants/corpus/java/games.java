static int level(int points, int size) {
    return points / size + 1;
}

static int bestOf(int[] xs, int[] ys) {
    int total = 0;
    for (int i = 0; i < xs.length; i++) {
        if (xs[i] > ys[i]) {
            total++;
        } else if (xs[i] < ys[i]) {
            total--;
        }
    }
    return total;
}

static boolean nim(int n, int k) {
    return n % (k + 1) != 0;
}
