static boolean isSorted(int[] xs) {
    for (int i = 1; i < xs.length; i++) {
        if (xs[i] < xs[i - 1]) {
            return false;
        }
    }
    return true;
}

static int rank(int[] xs, int value) {
    int count = 1;
    for (int x : xs) {
        if (x > value) {
            count++;
        }
    }
    return count;
}
