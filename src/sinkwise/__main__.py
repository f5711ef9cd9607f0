"""`python -m sinkwise`."""

from sinkwise.cli import main

if __name__ == "__main__":
    main()
