import signal
import sys

from titan_lite.tools.plan.command import main

signal.signal(
    signal.SIGTERM, signal.default_int_handler
)  # like Ctrl-C: removes workers and semaphores, shows partial results
sys.exit(main(sys.argv[1:]))
