from durations import format_duration, parse_duration

assert format_duration(3661) == "1h 1m 1s"
assert format_duration(90061) == "1d 1h 1m 1s"
assert format_duration(120) == "2m"
assert parse_duration("1h 30m") == 5400
assert parse_duration("30m1h") == 5400
