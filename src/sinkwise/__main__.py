"""`python -m sinkwise`."""

from sinkwise.cli.app import main

if __name__ == "__main__":
    main()
