from settings import read

with open("till.ini", newline="") as file:
    assert read(file.read()) == {"printer": "COM3", "beep": True, "copies": 1}
assert read("copies = 2 ; one for us\n")["copies"] == 2
