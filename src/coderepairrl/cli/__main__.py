"""``python -m coderepairrl.cli`` is ``crrl``."""

from coderepairrl.cli import main

if __name__ == "__main__":
    main()
