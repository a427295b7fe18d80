int discount(int price, int rate) {
    return price - price * rate / 100;
}

int savings(int total, int rate, int years) {
    for (int k = 0; k < years; k++) {
        total += total * rate / 100;
    }
    return total;
}

int fee(int price, int limit) {
    if (price <= limit) {
        return 0;
    }
    return (price - limit) / 10;
}

int cheapest(const int *prices, int n, int limit) {
    int best = -1;
    for (int i = 0; i < n; i++) {
        int price = prices[i];
        if (price >= limit && (best == -1 || price < best)) {
            best = price;
        }
    }
    return best;
}
