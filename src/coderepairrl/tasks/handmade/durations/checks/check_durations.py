from durations import format_duration, parse_duration

assert format_duration(3661) == "1h 1m 1s"
assert format_duration(90061) == "1d 1h 1m 1s"
assert format_duration(120) == "2m"
assert parse_duration("1h 30m") == 5400
assert parse_duration("30m1h") == 5400

assert format_duration(0) == "0s", format_duration(0)
assert format_duration(-90) == "-1m 30s", format_duration(-90)
assert format_duration(-86400) == "-1d"
for seconds in (-100000, -3601, -1, 0, 1, 59, 60, 86399, 86400, 200000):
    assert parse_duration(format_duration(seconds)) == seconds, seconds
try:
    parse_duration("soon")
except ValueError:
    pass
else:
    raise AssertionError("'soon' was accepted")
