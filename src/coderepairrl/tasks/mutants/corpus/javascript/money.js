function discount(price, rate) {
    return price - Math.floor(price * rate / 100);
}

function savings(total, rate, years) {
    for (let k = 0; k < years; k++) {
        total += Math.floor(total * rate / 100);
    }
    return total;
}

function fee(price, limit) {
    if (price <= limit) {
        return 0;
    }
    return Math.floor((price - limit) / 10);
}

function cheapest(prices, limit) {
    let best = -1;
    for (const price of prices) {
        if (price >= limit && (best === -1 || price < best)) {
            best = price;
        }
    }
    return best;
}
