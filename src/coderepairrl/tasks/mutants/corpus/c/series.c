int fibonacci(int n) {
    int a = 0;
    int b = 1;
    for (int k = 0; k < n; k++) {
        int c = a + b;
        a = b;
        b = c;
    }
    return a;
}

int triangle(int n) {
    return n * (n + 1) / 2;
}

int collatz(int n) {
    int count = 0;
    while (n != 1) {
        if (n % 2 == 0) {
            n = n / 2;
        } else {
            n = 3 * n + 1;
        }
        count++;
    }
    return count;
}
