function boxes(n, size) {
    return Math.floor((n + size - 1) / size);
}

function reorder(count, limit, size) {
    if (count > limit) {
        return 0;
    }
    return size - count;
}

function totalPrice(prices, counts) {
    let total = 0;
    for (let i = 0; i < prices.length; i++) {
        total += prices[i] * counts[i];
    }
    return total;
}

function heaviest(xs, limit) {
    let best = 0;
    for (const x of xs) {
        if (x <= limit && x > best) {
            best = x;
        }
    }
    return best;
}
