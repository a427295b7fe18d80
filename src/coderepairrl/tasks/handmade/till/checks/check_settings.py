from settings import read

with open("till.ini", newline="") as file:
    assert read(file.read()) == {"printer": "COM3", "beep": True, "copies": 1}
assert read("copies = 2 ; one for us\n")["copies"] == 2

for word in ("no", "off", "false", "0", "No", "FALSE"):
    assert read(f"beep = {word}\r\n")["beep"] is False, word
for word in ("yes", "on", "true", "1", "Yes"):
    assert read(f"beep={word}")["beep"] is True, word
try:
    read("copies = 1\nbeep = maybe\n")
except ValueError as error:
    assert "line 2" in str(error), error
else:
    raise AssertionError("'maybe' was accepted")
with open("settings.py", "rb") as file:
    source = file.read()
assert source.count(b"\n") == source.count(b"\r\n"), "the line ends were converted"
