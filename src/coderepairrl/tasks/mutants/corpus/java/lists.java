static int indexOf(int[] xs, int value) {
    for (int i = 0; i < xs.length; i++) {
        if (xs[i] == value) {
            return i;
        }
    }
    return -1;
}

static int lastIndex(int[] xs, int value) {
    int result = -1;
    for (int i = 0; i < xs.length; i++) {
        if (xs[i] == value) {
            result = i;
        }
    }
    return result;
}
