static int discount(int price, int rate) {
    return price - price * rate / 100;
}

static int savings(int total, int rate, int years) {
    for (int k = 0; k < years; k++) {
        total += total * rate / 100;
    }
    return total;
}

static int fee(int price, int limit) {
    if (price <= limit) {
        return 0;
    }
    return (price - limit) / 10;
}

static int cheapest(int[] prices, int limit) {
    int best = -1;
    for (int price : prices) {
        if (price >= limit && (best == -1 || price < best)) {
            best = price;
        }
    }
    return best;
}
