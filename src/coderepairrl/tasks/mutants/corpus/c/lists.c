int index_of(const int *xs, int n, int value) {
    for (int i = 0; i < n; i++) {
        if (xs[i] == value) {
            return i;
        }
    }
    return -1;
}

int last_index(const int *xs, int n, int value) {
    int result = -1;
    for (int i = 0; i < n; i++) {
        if (xs[i] == value) {
            result = i;
        }
    }
    return result;
}
